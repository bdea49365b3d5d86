# SPDX-License-Identifier: Apache-2.0
"""Run what only GPUs can show, stage by stage in one call on a CUDA host: `python3 -m tests.gpu.prove OUT STAGE ...`

Stages joined by `+` run at the same time. `@FILE` instead of stages runs lanes at the same time: each line of the file
is GPUS: STAGE ..., the GPUs that the lane's stages see (`4,5`) and stages that run one after the other.
`tests/gpu/lanes/` has those for one, two, four and eight GPUs.

A stage has a time limit of PROVE_LIMIT seconds (570), `STAGE~SECONDS` one of its own. It prints its important lines at
its end. A failed stage does not stop the next. All stages end PROVE_SECONDS (no limit) after the start; later ones are
not run. Every half minute a stage reports how far its log is. The last output is a table. Every log, table and profile
is in OUT/logs.tar.gz, which is rewritten with each printed line.
Another megatron-core that is first on PYTHONPATH (scripts/mcore.sh) serves every stage; the first line names the
release. Stages:

    smoke, kernels, graphs, graphs1, graphs4, compile, compile2, parity, parity4, experts, experts1, overlapped,
    weights, swaps                      tests of this folder
    bench:SHAPE[:SETTING,...]           `megarl bench train`, with a profile
    sync:SHAPE[:SETTING,...]            `megarl bench sync`
    rollout:SHAPE[:SETTING,...]         `megarl bench rollout`
    transfer:SHAPE[:WORD,...]           `tests.gpu.transfer_times`
    overlap[:SHAPE:RANKS:TOKENS]        `tests.gpu.overlap_times`
    updates[:WORD,...]                  `tests.gpu.update_times`
    script:FILE                         a shell script
    sleep[:CYCLES:SHAPE]                an engine's sleep on the trainer's GPU
    modes[:MODE]                        `tests.gpu.train_modes`: `megarl train` where trainer and engine share a GPU;
                                        with `0,1@` two tensor parallel ranks and an engine of two
    shared[:SHAPE[:NUMERICS]]           `tests.gpu.share_base`: one copy of the base for trainer and engine
    twice[:SETTING,...]                 `megarl train` twice with the same seeds, `numerics: bitwise`
    loop:SHAPE[:SETTING,...]            `megarl bench loop`: a run in turns, and one side by side
    bitwise-ops[:NAME,...]              `tests.gpu.bitwise_ops`: each operation of `numerics: bitwise`
    bitwise[:SHAPE[:SETTING,...]]       `tests.gpu.bitwise_model`: sampler against trainer
    models                              writes the models of the next two
    matrix:FAMILY:BACKEND:DTYPE:RANKS[:SECTION.KEY=VALUE,...|--layouts=NAMES]   `megarl verify --matrix`
    verify:MODEL:BACKEND:DTYPE[:AXIS=SIZE,SECTION.KEY=VALUE,...]

`0@STAGE` shows the stage the first GPU only.

Layouts, a stage each; the table has the same contender on one GPU beside them (`one_rank=false` without it). Each
contender is built twice; `contenders=[te]` or `[te,local]` keeps a stage of a large shape within PROVE_LIMIT:

    bench:qwen3-8b:tensor=2,steps=3,contenders=[te,local]
    bench:qwen3-8b:tensor=4,steps=3,contenders=[te,local]
    bench:qwen3-8b:pipeline=2,steps=3,contenders=[te,local]
    bench:qwen3-8b:pipeline=4,steps=3,contenders=[te]
    bench:qwen3-8b:context=2,steps=3,contenders=[te,local]
    bench:qwen3-0.6b:data=4
    bench:qwen3-30b-a3b:data=4,expert=4,layers=12,steps=3,contenders=[te,local]

What costs the host most: `bench:qwen3-8b:dropout=0.05`, `recompute=full`, `recompute=selective`, each also with
`compile=true` and `cuda_graphs=true`. Weight syncs: `sync:qwen3-8b:tensor=2`, `sync:qwen3-30b-a3b:layers=12,tensor=2`.
"""

import contextlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from megarl.parallel import mcore

MODELS = Path("/tmp/megarl-models")
MEGARL = [sys.executable, "-m", "megarl.cli.main"]
PYTEST = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-p", "no:xdist"]
TESTS = {
    "kernels": [
        "test_grouped_experts.py",
        "test_logprobs.py",
        "test_context_attention.py",
        "test_heads.py",
        "test_row_kernels.py",
        "test_fast_math.py",
    ],
    "overlapped": ["test_overlapped.py"],
    "graphs": ["test_graphs.py"],
    "graphs1": ["test_graphs.py", "-k", "1"],
    "graphs4": ["test_graphs.py", "-k", "2 or 4"],
    "compile": ["test_compile.py"],
    "compile2": ["test_compile.py", "-k", "2"],
    "parity": ["test_parity_cuda.py"],
    "parity4": ["test_parity_cuda.py", "-k", "(SPxCP2 or SPxEP2xETP2xDP2 or TP2xPP2) and not qwen3_moe"],
    "experts1": ["test_grouped_experts.py"],
    "experts": ["test_parity_cuda.py", "-k", "bf16 and qwen3_moe"],
    "weights": ["test_weight_path.py"],
    "swaps": ["test_bitwise.py"],
}
ARCHIVING = threading.Lock()
# Patterns of the lines to show: of a test or verification, of any other log.
TESTED, OTHER = r"^\d+ places|worst|comparisons|passed|failed|skipped|^E  ", r"^[^{]"
VERIFIED = r"^ *\d+ s  |\bNO\b|Error|megarl:"
LIMIT, SHOWN = int(os.environ.get("PROVE_LIMIT", "570")), int(os.environ.get("PROVE_SHOWN", "30"))
SAY_SECONDS = 30
# Larger files stay on the host, in bytes.
LARGEST = 4 * 2**20
# When all stages end, as a time of time.monotonic().
END = time.monotonic() + float(os.environ.get("PROVE_SECONDS", "inf"))
# A stage that has less time than this is not run.
LEAST_SECONDS, NOT_RUN = 20, -1


def command_of(stage: str, out: Path) -> tuple[list[str], str]:
    """Return a stage's command, and the pattern of the lines to show. Tables go to ``out``."""
    kind, *rest = stage.rpartition("@")[2].partition("~")[0].split(":")
    page = ["--out", str(out / f"{file_name(stage)}.md")]
    match kind, rest:
        case "smoke", []:
            return [sys.executable, "-m", "tests.gpu.te_smoke"], "^(te|torch|attention|smoke)"
        case "models", []:
            return [sys.executable, "-m", "tests.gpu.models", str(MODELS)], OTHER
        case "bench", [shape, *settings]:
            options = options_of(settings)
            folder = ["--profile", "--out", str(out / file_name(stage))]
            return [*MEGARL, "bench", "train", shape, *options, *folder], OTHER
        case "sync" | "rollout" | "loop", [shape, *settings]:
            folder = ["--out", str(out / file_name(stage))]
            return [*MEGARL, "bench", kind, shape, *options_of(settings), *folder], OTHER
        case "transfer", [shape, *words]:
            return [sys.executable, "-m", "tests.gpu.transfer_times", shape, *words], OTHER
        case "overlap", words:
            return [sys.executable, "-m", "tests.gpu.overlap_times", *words], OTHER
        case "updates", names:
            return [sys.executable, "-m", "tests.gpu.update_times", *",".join(names).replace(",", " ").split()], OTHER
        case "script", [file]:
            return ["bash", file], OTHER
        case "sleep", words:
            return [sys.executable, "-m", "tests.gpu.sleep_cycles", *words], OTHER
        case "shared", words:
            return [sys.executable, "-m", "tests.gpu.share_base", *words], OTHER
        case "bitwise-ops", names:
            return [sys.executable, "-m", "tests.gpu.bitwise_ops", *",".join(names).replace(",", " ").split()], OTHER
        case "bitwise", words:
            return [sys.executable, "-m", "tests.gpu.bitwise_model", *words[:1], *options_of(words[1:])], OTHER
        case "modes", names:
            return [sys.executable, "-m", "tests.gpu.train_modes", str(out / "modes"), *names], OTHER
        case "twice", words:
            return [sys.executable, "-m", "tests.gpu.train_twice", str(out / "twice"), *options_of(words)], OTHER
        case "matrix", [family, backend, dtype, ranks, *settings]:
            options = ["lora.r=8", f"model.backend={backend}", f"model.dtype={dtype}", *options_of(settings)]
            return [*MEGARL, "verify", str(MODELS / family), *options, "--matrix", "--ranks", ranks, *page], VERIFIED
        case "verify", [model, backend, dtype, *layout]:
            more = [o if "." in o.partition("=")[0] else f"parallel.{o}" for o in options_of(layout)]
            options = [f"model.backend={backend}", f"model.dtype={dtype}", *more]
            return [*MEGARL, "verify", str(MODELS / model), *options, *page], VERIFIED
        case kind, [] if kind in TESTS:
            words = [f"tests/gpu/{word}" if word.endswith(".py") else word for word in TESTS[kind]]
            return [*PYTEST, *words], TESTED
    raise SystemExit(f"unknown stage '{stage}'\n\n{__doc__}")


def options_of(settings: list[str]) -> list[str]:
    """Split ``KEY=VALUE,...``, where a value may be a list."""
    return [option for setting in settings for option in re.split(r",(?=[\w.]+=)", setting)]


def file_name(stage: str) -> str:
    """Return the stage's name in file names."""
    return re.sub(r"[^\w.]+", "-", stage).strip("-")[:200]


def archive(work: Path, out: Path) -> None:
    """Store the logs so far, because the whole run may be cut off."""
    with ARCHIVING, tarfile.open(out / "logs.tar.gz", "w:gz") as file:
        for folder, folders, names in os.walk(work):
            folders[:] = [name for name in folders if name != "checkpoints"]  # large
            for path in (Path(folder) / name for name in names):
                with contextlib.suppress(OSError):  # a run that goes on moves its files
                    if path.stat().st_size < LARGEST:
                        file.add(path, Path("logs") / path.relative_to(work))


def run(stage: str, out: Path, results: dict[str, tuple[int, float]], keep: Callable[[], None]) -> None:
    """Run a stage, print its progress and important lines, store ``(status, seconds)`` and the logs."""
    command, shown = command_of(stage, out)
    limit = min(float(stage.partition("~")[2] or LIMIT), END - time.monotonic())
    if limit < LEAST_SECONDS:
        results[stage] = NOT_RUN, 0.0
        return
    gpus, at, _ = stage.rpartition("@")
    # A stage that is stuck says where, when its time is up.
    environment = os.environ | {"PYTHONFAULTHANDLER": "1"} | ({"CUDA_VISIBLE_DEVICES": gpus} if at else {})
    log, start = out / f"{file_name(stage)}.log", time.monotonic()
    with log.open("w") as handle:
        process = subprocess.Popen(
            ["timeout", "--signal=ABRT", "--kill-after=10", str(limit), *command],
            stdout=handle,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        while (status := ended(process)) is None:
            last = (log.read_text(errors="replace").splitlines() or [""])[-1]
            print(f"{time.monotonic() - start:4.0f} s  {stage}: {last[:160]}", flush=True)
            keep()
    results[stage] = status, time.monotonic() - start
    lines = log.read_text(errors="replace").splitlines()
    matter = [line for line in lines if re.search(shown, line)][-SHOWN:] + (lines[-12:] if status else [])
    print("\n".join([f"== {stage}: status {status}", *(line[:240] for line in matter)]), flush=True)
    keep()


def ended(process: subprocess.Popen) -> int | None:
    """Return the status, or None if the process does not end for a while."""
    try:
        return process.wait(SAY_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def lanes_of(words: tuple[str, ...]) -> list[list[str]]:
    """Return lanes of groups of stages. Stages of a file's lane see its GPUs only."""
    if not words[0].startswith("@"):
        return [list(words)]
    lines = [line.partition("#")[0] for line in Path(words[0][1:]).read_text().splitlines()]
    parts = [line.partition(": ") for line in lines if line.strip()]
    return [
        [
            "+".join(stage if "@" in stage else f"{gpus.strip()}@{stage}" for stage in group.split("+"))
            for group in groups.split()
        ]
        for gpus, _, groups in parts
    ]


def main(out_folder: str, *words: str) -> int:
    """Run all lanes at the same time, the groups of each one after the other; return 0 if every stage succeeded."""
    out, work, lanes = Path(out_folder), Path(tempfile.mkdtemp(prefix="megarl-prove-")), lanes_of(words)
    for stage in [stage for lane in lanes for group in lane for stage in group.split("+")]:
        command_of(stage, work)
    out.mkdir(parents=True, exist_ok=True)
    print(f"megatron-core {mcore.release()}", flush=True)
    results: dict[str, tuple[int, float]] = {}

    def run_lane(lane: list[str]) -> None:
        for group in lane:
            stages = group.split("+")
            with ThreadPoolExecutor(len(stages)) as pool:
                runs = [pool.submit(run, stage, work, results, lambda: archive(work, out)) for stage in stages]
                for done in as_completed(runs):
                    done.result()

    with ThreadPoolExecutor(len(lanes)) as pool:
        for lane in as_completed([pool.submit(run_lane, lane) for lane in lanes]):
            lane.result()
    print("\n".join(f"{stage:<48} {status:>4} {seconds:6.0f} s" for stage, (status, seconds) in results.items()))
    return int(any(status for status, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
