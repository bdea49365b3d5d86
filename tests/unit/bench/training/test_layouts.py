# SPDX-License-Identifier: Apache-2.0
"""Test `megarl bench` at parallel layouts: what it refuses, how it counts and compares, and what a lost rank does."""

import time
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.bench.report import table
from megarl.bench.rollouts.settings import parse_rollout_settings
from megarl.bench.settings import model_config
from megarl.bench.syncing import sync
from megarl.bench.syncing.settings import parse_sync_settings as parse_sync
from megarl.bench.training import ranks, train
from megarl.bench.training.clock import Clock
from megarl.bench.training.flops import linears_of, work_per_token
from megarl.bench.training.settings import BenchSettings, parse_settings
from megarl.errors import ConfigError, MegarlError
from megarl.model.weights.full_config import full_config

# The first argument says which rank fails; the others would wait for it.
SCRIPT = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("the rank's last words", flush=True)
    sys.exit(3)
time.sleep(600)
"""


def test_the_batch_grows_with_data_and_a_pipeline_gets_micro_batches() -> None:
    settings = parse_settings("tiny-moe", ["data=2", "expert=2", "pipeline=2", "sequences=3", "length=10"])
    assert (settings.world_size, settings.rounds, settings.batch, settings.tokens) == (4, 8, 48, 480)
    alone = settings.alone()
    assert (alone.world_size, alone.expert, alone.rounds, alone.batch) == (1, 1, 8, 24)
    assert BenchSettings.model_validate_json(settings.model_dump_json()) == settings
    assert parse_settings("tiny", ["context=2", "length=30", "sequences=2"]).train.micro_batch_tokens == 64
    assert parse_settings("tiny", ["tensor=2"]).layout.sequence_parallel


def test_phases_of_several_micro_batches_are_added_up() -> None:
    clock = Clock(torch.device("cpu"))

    def step() -> None:
        for _ in range(2):
            clock.mark_next_forward()
            time.sleep(0.01)
            clock.mark("forward")
            time.sleep(0.03)
        clock.mark("backward")

    clock.time(step)
    phases = clock.medians()
    assert set(phases) == {"forward", "backward", "total"}
    assert phases["forward"] >= 20 and phases["backward"] >= 60
    assert phases["total"] == pytest.approx(phases["forward"] + phases["backward"], rel=0.01)


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("tiny", ["tensor=3"], "must divide the model's num_attention_heads (2)"),
        ("tiny", ["pipeline=3"], "num_hidden_layers (2)"),
        ("tiny", ["pipeline=2", "layers=1"], "num_hidden_layers (1)"),
        ("tiny", ["expert=2"], "the model has no experts"),
        ("tiny-moe", ["expert=2"], "must divide parallel.tensor (1)"),
        ("tiny", ["virtual_pipeline=2"], "needs parallel.pipeline > 1"),
        ("tiny", ["recompute_layers=1"], "needs train.recompute 'full'"),
        ("tiny", ["recompute=some"], "'none', 'selective' or 'full'"),
        ("tiny", ["cuda_graphs=true", "dropout=0.1", "tensor=2"], "lora.lora_dropout = 0.1"),
        ("tiny", ["cuda_graphs=true", "context=2"], "parallel.context = 2"),
        (
            "tiny-moe",
            ["cuda_graphs=true", "dtype=float32"],
            "num_experts = 4 in the model's config.json, and model.dtype",
        ),
        ("tiny-moe", ["cuda_graphs=true", "r=12"], "lora rank r = 12"),
        ("tiny-moe", ["cuda_graphs=true", "compile=true", "contenders=[local]"], "train.compile = true"),
        ("tiny-moe", ["cuda_graphs=true", "data=2", "expert=2"], "parallel.expert = 2"),
        ("tiny", ["layers=3"], "'tiny' has 2"),
        ("tiny", ["tensors=2"], "did you mean 'tensor'"),
    ],
)
def test_what_megarl_refuses_is_refused_before_anything_starts(model: str, overrides: list[str], message: str) -> None:
    with pytest.raises(MegarlError) as raised:
        parse_settings(model, overrides)
    assert message in str(raised.value)


def test_named_shapes_can_be_shortened_and_folders_cannot(tmp_path: Path) -> None:
    assert model_config("qwen3-30b-a3b", parse_settings("qwen3-30b-a3b", ["layers=4"]).layers) == (
        model_config("qwen3-30b-a3b") | {"num_hidden_layers": 4}
    )
    assert parse_sync("qwen3-30b-a3b", ["layers=2", "tensor=4"]).tensor == 4
    with pytest.raises(ConfigError, match="only named shapes can be shortened"):
        model_config(str(tmp_path), 2)
    with pytest.raises(ConfigError, match=r"sampler.parallel.tensor \(3\) must divide"):
        parse_sync("tiny", ["tensor=3"])
    with pytest.raises(MegarlError, match="bench rollout: 'tiny-moe' is a mixture"):
        parse_rollout_settings("tiny-moe")


def test_too_few_gpus_are_one_clear_error(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    settings = parse_settings("tiny", ["tensor=2", "data=2"])
    with pytest.raises(ConfigError, match=r"the layout \(data 2 x tensor 2\) needs 4 GPUs, but torch sees 2"):
        train.bench_train(settings, tmp_path / "out", profile=False)
    assert not (tmp_path / "out").exists()
    ranks.check_gpus(2, "auto", "")
    ranks.check_gpus(4, "cpu", "")
    with pytest.raises(ConfigError, match="an engine of 4 ranks"):
        sync.bench_sync(parse_sync("qwen3-8b", ["tensor=4"]), tmp_path)
    with pytest.raises(ConfigError, match="a trainer of 4 ranks"):
        sync.bench_sync(parse_sync("qwen3-8b", ["data=4"]), tmp_path)


@pytest.mark.parametrize(
    ("gpus", "data", "engines", "tensor", "expected"),
    [
        (5, 1, 2, 2, [[1, 2], [3, 4]]),
        (4, 1, 2, 2, [[0, 1], [2, 3]]),
        (3, 1, 2, 2, [[0, 1], [0, 1]]),
        (3, 1, 2, 1, [[1], [2]]),
        (2, 1, 2, 1, [[0], [1]]),
        (1, 1, 2, 1, [[0], [0]]),
        (4, 2, 2, 1, [[2], [3]]),
        (2, 2, 2, 1, [[0], [1]]),
        (2, 2, 4, 1, [[0], [1], [0], [1]]),
        (4, 1, 3, 2, [[0, 1], [2, 3], [0, 1]]),
    ],
)
def test_engines_get_gpus_of_their_own_if_there_are_enough(monkeypatch, gpus, data, engines, tensor, expected) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    settings = parse_sync("tiny", [f"data={data}", f"engines={engines}", f"tensor={tensor}"])
    assert [sync.gpus_of(settings, engine) for engine in range(engines)] == expected


def test_a_lost_rank_ends_the_others_and_is_named(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks, "COMMAND", [ranks.sys.executable, "-c", SCRIPT])
    began = time.monotonic()
    result = ranks.run_contender("local", parse_settings("tiny", ["tensor=2"]), tmp_path)
    assert time.monotonic() - began < 60
    assert result == {"name": "local", "error": "rank 1 of 2 failed with status 3: the rank's last words"}
    log = (tmp_path / "local.log").read_text()
    assert "rank 1 of 2 failed" in log and str(tmp_path / "local-rank1.log") in log


def test_only_experts_that_a_token_uses_are_counted() -> None:
    """The forward pass of Hugging Face's model without adapters, counted by torch: attention without its mask."""
    from megarl.bench.training.peft_step import _build

    settings = parse_settings("tiny-moe", ["dtype=float32", "length=8"])
    network = _build(settings, torch.device("cpu"))
    network.set_attn_implementation("eager")
    network.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(input_ids=torch.arange(16).reshape(2, 8), use_cache=False)
    config = model_config("tiny-moe")
    heads = config["num_attention_heads"] * config["head_dim"]
    unmasked = 2 * 2 * config["num_hidden_layers"] * heads * (8 - (8 + 1) / 2)
    work = work_per_token(config, rank=0, length=8, response=1.0)
    assert counter.get_total_flops() / 16 == pytest.approx(work.forward + unmasked, rel=1e-3)


def test_each_expert_of_a_token_has_an_adapter_and_the_router_has_none() -> None:
    config = model_config("tiny-moe")
    linears = linears_of(full_config(config), 0)
    hidden, inner, active = config["hidden_size"], config["moe_intermediate_size"], config["num_experts_per_tok"]
    experts = [one for one in linears if one.times == active]
    assert len(experts) == 3 and all(one.outputs + one.inputs == hidden + inner for one in experts)
    assert [(one.outputs, one.inputs) for one in linears if not one.adapted] == [(config["num_experts"], hidden)]
    one, two = (work_per_token(config, rank=rank, length=8, response=1.0).forward for rank in (1, 2))
    attention = sum(one.outputs + one.inputs for one in linears[:4])
    assert two - one == 2 * config["num_hidden_layers"] * (attention + 3 * active * (hidden + inner))


def measured(name: str, ranks: int, rate: float, **more) -> dict:
    numbers = {"step_ms": 100.0, "logprob_pass_ms": 1.0, "peak_gib": 2.0, "optimizer": True, "phases": {"optimizer": 1}}
    return {"name": name, "backend": name, "ranks": ranks, "tokens_per_second": rate} | numbers | more


def test_the_table_compares_a_layout_with_one_rank(tmp_path: Path, monkeypatch) -> None:
    settings = parse_settings("tiny", ["data=4", "contenders=[te,local,full,peft]", "compile=true", "dropout=0.1"])
    asked = []

    def run(name, settings, out, flags=(), label=None):
        asked.append((label or name, settings.world_size, settings.batch))
        if name == train.GEMM:
            return {"tflops": 1e-6}
        if label == "full-one-rank":
            return {"name": name, "error": "CUDA out of memory"}
        rate = {"local": 300.0, "local-one-rank": 100.0, "full": 200.0, "peft": 50.0}[label or name]
        return measured(name, settings.world_size, rate)

    monkeypatch.setattr(train, "run_contender", run)
    report = train.bench_train(settings, tmp_path, profile=False)
    assert asked == [
        ("gemm", 1, 4), ("local", 4, 16), ("local-one-rank", 1, 4), ("full", 4, 16), ("full-one-rank", 1, 4),
        ("peft", 1, 4),
    ]  # fmt: skip
    local, full, _ = report["contenders"]
    assert (local["speed_up"], local["efficiency"], local["over_peft"]) == (3.0, 0.75, 1.5)
    assert local["gemm_share"] == pytest.approx(report["work"]["lora"] * 75 / 1e6) and "speed_up" not in full
    lines = table(report).splitlines()
    assert lines[0].startswith(
        "tiny, data 4: 16 x 32 tokens in micro-batches of 4, r=16, bfloat16, dropout=0.1, compile"
    )
    rows = [line.split() for line in lines]
    assert ["local", "300", "4", "75", "100", "3.00x", "75%"] in [row[:7] for row in rows]
    assert ["peft", "50", "1", "50", "-", "-", "-"] in [row[:7] for row in rows]
    assert "full on one rank failed: CUDA out of memory" in lines
    assert "te is left out: Transformer Engine is not installed" in lines
    assert "data: the batch grows with it; one rank and peft have 4 sequences a step" in lines


def test_contenders_that_cannot_do_it_are_left_out_with_the_reason(tmp_path: Path) -> None:
    assert list(train.left_out(parse_settings("tiny-moe", ["contenders=[local,peft]"]))) == ["peft"]
    copies = train.left_out(parse_settings("tiny", ["tensor=2", "contenders=[local,full]"]))
    assert copies == {"full": "tensor is 2, and gradients of copied KV heads (1) would not be added up"}
    layers = parse_settings("tiny", ["recompute=full", "recompute_layers=1", "contenders=[local,full,peft]"])
    assert "all layers or none" in train.left_out(layers)["peft"]
    assert train.left_out(parse_settings("tiny", ["recompute=full", "contenders=[local,full,peft]"])) == {}
    with pytest.raises(ConfigError, match="no contender is left"):
        train.bench_train(parse_settings("tiny-moe", ["contenders=[peft]"]), tmp_path, profile=False)
