# SPDX-License-Identifier: Apache-2.0
"""Run the reference in its own processes: compute truth and yardstick, and read back what megarl saved."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from transformers.utils.logging import disable_progress_bar

from megarl.errors import UnsupportedError
from megarl.families.base import EMBEDDING
from megarl.lora.files.peft_folder import WEIGHTS
from megarl.lora.merge import open_pairs
from megarl.lora.targets.resolve import EMBED_MODULE
from megarl.model.weights.hf_folder import WeightFolder
from megarl.parallel.device import pick_device
from megarl.peft.rules import rank_and_scaling
from megarl.verify.bounds import EXPORTED_WEIGHTS, MERGED_LOAD, MERGED_WEIGHTS, PEFT_LOAD
from megarl.verify.cases import Case, Place
from megarl.verify.compare import Finding, Outcome, Rule, compare, compare_logprobs, is_worse
from megarl.verify.inputs.samples import weights_of
from megarl.verify.launch import free_memory, report_progress, run_ranks
from megarl.verify.reference.hf_peft import all_logprobs, gradient_norm, load_reference, run_reference
from megarl.verify.reference.router_margins import RouterMargins

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Factor of the memory of the weights: one largest tensor more, and activations of short sequences.
HEADROOM = 1.3
# Name under which a case stores the yardstick.
YARDSTICK = "yardstick"
# Number of attempts to find samples without ties.
ATTEMPTS = 3

Item = TypeVar("Item")


def run_shared(
    function: Callable[[Item], Any], items: Sequence[Item], report: Callable[[str], None] | None = None
) -> list[Any]:
    """Call ``function(item)`` in reference processes: one per core on a CPU host, else one. Results are in order."""
    if not items:
        return []
    processes = 1 if torch.cuda.is_available() else min(len(items), os.cpu_count() or 1)
    shares = run_ranks(_share, processes, function, list(items), report=report)
    return [shares[index % processes][index // processes] for index in range(len(items))]


def _share(function: Callable[[Item], Any], items: list[Item]) -> list[Any]:
    disable_progress_bar()  # transformers' own progress bar for each folder it reads
    results = []
    for item in items[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]:
        results.append(function(item))
        free_memory()
    return results


def choose(case: Case) -> tuple[str, torch.device]:
    """Choose dtype and device of the truth: float64 if the weights fit; the GPU before the host.

    Raises:
        UnsupportedError: one process cannot hold the model in float32 either.
    """
    source = WeightFolder(case.model)
    elements = 0
    for name in source.file_of:
        count = 1
        for size in source.get_slice(name).get_shape():
            count *= size
        elements += count
    places = [(torch.device("cpu"), psutil.virtual_memory().available)]
    device = pick_device(case.config.train.device)
    if device.type == "cuda":
        places.insert(0, (device, torch.cuda.mem_get_info(device)[0]))
    for dtype in ("float64", "float32"):
        for place, free in places:
            if elements * DTYPES[dtype].itemsize * HEADROOM <= free:
                return dtype, place
    raise UnsupportedError(
        f"model.path: {case.model} has {elements / 1e9:.1f}e9 weights, too many for one process of Hugging Face + PEFT "
        "here; `megarl verify MODEL --matrix` checks a small model of the same family"
    )


def make_truth(case: Case) -> str:
    """Compute and store the truth, unless it is stored already; return its dtype."""
    if case.has("truth-is"):
        return case.read("truth-is")[0]
    dtype, device = choose(case)
    outcome, margins = _run_truth(case, dtype, device)
    for _ in range(ATTEMPTS):
        samples = case.samples()
        clear = margins.without_ties(samples)
        # In a large model experts tie in most samples; then no batch is free of ties.
        if not len(samples) / 2 <= len(clear) < len(samples):
            break
        report_progress(
            f"{case.name}: experts tie in {len(samples) - len(clear)} of {len(samples)} samples, which are left out"
        )
        case.keep_samples(clear)
        # Fewer samples change the updates.
        outcome, margins = _run_truth(case, dtype, device)
    case.write("truth", outcome)
    case.write("truth-is", (dtype, device))
    return dtype


def _run_truth(case: Case, dtype: str, device: torch.device) -> tuple[Outcome, RouterMargins]:
    rounded: list[dict[str, torch.Tensor]] = []
    if case.dtype == "float32":
        report_progress(f"{case.name}: Hugging Face + PEFT in float32 on {device.type}: its own rounding")
        model = _rounding(case, dtype).to(device)
        _set_scale(case, model)
        rounding = run_reference(model, case.samples(), case.all_weights(), case.config, keep=rounded)
        if dtype != case.dtype:
            case.write(YARDSTICK, rounding)  # make_yardstick can use it as the yardstick
        del model
        free_memory()  # ``choose`` left room for one model only
    report_progress(f"{case.name}: Hugging Face + PEFT in {dtype} on {device.type}: the truth")
    model = load_reference(case.model, case.adapter, DTYPES[dtype]).to(device)
    if case.dtype != "float32":
        _set_scale(case, model)
    margins = RouterMargins()
    # A dtype coarser than float32 has ties everywhere, and a rule that allows for them.
    with margins.listen(model) if case.dtype == "float32" else nullcontext():
        return run_reference(model, case.samples(), case.all_weights(), case.config, rounded), margins


def _set_scale(case: Case, model: torch.nn.Module) -> None:
    samples = case.samples()
    case.keep_scale(gradient_norm(model, samples, weights_of(samples), case.temperature))


def _rounding(case: Case, truth: str) -> torch.nn.Module:
    """Load the reference in the dtype under test, with other kernels if the truth itself is in that dtype."""
    return load_reference(case.model, case.adapter, DTYPES[case.dtype], "sdpa" if truth == case.dtype else "eager")


def make_yardstick(case: Case) -> dict[str, Finding]:
    """Compute and store the yardstick; return the error of each of its rows.

    If the truth had to be computed in the dtype under test, the yardstick uses other kernels and adds gradients up in
    the opposite order, so that their difference is rounding.
    """
    if not case.has(YARDSTICK):
        case.write(YARDSTICK, _run_yardstick(case))
    return {finding.row: finding for finding in compare(case.read(YARDSTICK), case.read("truth"), case.rule)}


def _run_yardstick(case: Case) -> Outcome:
    dtype, device = case.read("truth-is")
    report_progress(f"{case.name}: Hugging Face + PEFT in {case.dtype} on {device.type}: the yardstick")
    model = _rounding(case, dtype).to(device)
    order = slice(None, None, -1 if dtype == case.dtype else 1)
    weights = [weights_S[order] for weights_S in case.all_weights()]
    outcome = run_reference(model, case.samples()[order], weights, case.config)
    outcome.logprobs[:] = outcome.logprobs[order]
    outcome.base_logprobs[:] = outcome.base_logprobs[order]
    return outcome


def read_back(place: Place) -> list[tuple[Finding, float]]:
    """Load what megarl saved into Hugging Face + PEFT; return ``(finding, the yardstick's error)`` of each row."""
    report_progress(f"{place.key}: Hugging Face + PEFT load what was saved")
    case, rule = place.case, place.case.rule
    dtype, device = case.read("truth-is")
    samples = case.samples()
    adapter, merged = place.folder / "adapter", place.folder / "merged"

    def logprobs(folder: Path, adapter: Path | None, dtype: str, merge: bool = False) -> Any:
        model = load_reference(folder, adapter, DTYPES[dtype]).to(device)
        if merge:
            model = model.merge_and_unload().to(DTYPES[truth_dtype])
        return all_logprobs(model, samples, case.temperature)

    truth_dtype = dtype
    truth = logprobs(case.model, adapter, dtype)
    loaded = compare_logprobs(PEFT_LOAD, case.read(f"{place.layout}/after"), truth, rule)
    error = 0.0
    if rule.needs_yardstick(loaded):
        error = compare_logprobs(PEFT_LOAD, logprobs(case.model, adapter, case.dtype), truth, rule).error
    if not merged.is_dir():  # the back end cannot export it, and has said so
        return [(loaded, error)]
    found = [(loaded, error), merged_weights(EXPORTED_WEIGHTS, case.model, adapter, place.folder / "exported", rule)]
    merged_loaded = compare_logprobs(MERGED_LOAD, logprobs(merged, None, dtype), truth, rule)
    error = 0.0
    if rule.needs_yardstick(merged_loaded):
        theirs = logprobs(case.model, adapter, case.dtype, merge=True)
        error = compare_logprobs(MERGED_LOAD, theirs, truth, rule).error
    return [*found, (merged_loaded, error), merged_weights(MERGED_WEIGHTS, case.model, adapter, merged, rule)]


def merged_weights(row: str, model: Path, adapter: Path, merged: Path, rule: Rule) -> tuple[Finding, float]:
    """Compare merged tensors with ``W + scaling * B @ A`` in float64. The yardstick is that sum, rounded once."""
    worst, rounding = Finding(row, "", -1.0), 0.0
    for name, exact, tensor in exact_sums(model, adapter, merged):
        finding = rule.measure(row, {name: tensor}, {name: exact})
        if is_worse(finding.error, worst.error):
            worst = finding
            rounding = rule.measure(row, {name: exact.to(tensor.dtype)}, {name: exact}).error
    return worst, rounding


def exact_sums(model: Path, adapter: Path, merged: Path) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield ``(name, exact sum in float64, merged tensor)`` for every tensor of the merged folder."""
    from safetensors import safe_open

    before, after = WeightFolder(model), WeightFolder(merged)
    with safe_open(str(adapter / WEIGHTS), framework="pt") as source:
        _, matrices, targets, config = open_pairs(source, adapter, model)
        for name in after.file_of:
            tensor = after.get_slice(name)[:]
            # The base as it was trained on: rounded to the model's dtype.
            base = name if name in before.file_of else EMBEDDING[1]  # a tied embedding that the merge has untied
            exact = before.get_slice(base)[:].to(tensor.dtype).double()
            module = name.removesuffix(".weight")
            if module in targets:
                matrix_a, matrix_b = (matrix.double() for matrix in matrices.pair(module))
                delta = rank_and_scaling(config, targets[module])[1] * (matrix_b @ matrix_a)
                exact = exact + (delta.T if module == EMBED_MODULE else delta)
            yield name, exact, tensor
