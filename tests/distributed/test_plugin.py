# SPDX-License-Identifier: Apache-2.0
"""Put LoRA on a GPTModel that a script of mcore's own parts built: exact against PEFT, and resumable."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.errors import AdapterError
from megarl.lora import adapters_of
from megarl.model.weights.sharded_tensor import collect
from megarl.model.weights.streaming import stream_full
from megarl.verify.compare import relative_error
from megarl.verify.inputs.adapters import make_adapter
from megarl.verify.reference.hf_peft import adapter_tensors, load_reference
from tests.helpers.models import make_model
from tests.helpers.plugin_script import EXAMPLE, arguments, parsed, script
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import build

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]
UPDATES = 3


def train_with_mcore(model: str, folder: str, layout: dict, flags: list[str]) -> tuple[list, dict, dict]:
    """Return the losses, the first gradient and the adapter after some updates, by PEFT's names."""
    example, start = script(), Path(folder) / "start"
    args = parsed(model, layout, "--load-adapter", start, *flags)
    device = example.initialize(args)
    chunks, adapter = example.get_model(args, device)
    optimizer, scheduler = example.get_optimizer(args, chunks)
    adapter.load(start, optimizer)
    example.run_batch(0, args, chunks, device, forward_only=False)
    local_gradients = {name: parameter.main_grad for name, parameter in adapter.parameters()}
    gradients = collect(stream_full(adapter.tensors(local_gradients), adapter.groups))
    losses = [example.train_step(step, args, chunks, optimizer, scheduler, device)[0] for step in range(UPDATES)]
    after = collect(adapter.export())
    dist.destroy_process_group()
    return losses, gradients, after


def train_with_peft(model: Path, start: Path) -> tuple[list, dict, dict]:
    """Return the same from one process of Hugging Face + PEFT, in float64."""
    args = parsed(model, {})
    reference = load_reference(model, start, torch.float64)
    trained = {name: parameter for name, parameter in reference.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=args.lr, weight_decay=args.weight_decay)
    losses, gradients = [], {}
    for step in range(UPDATES):
        first = step * args.global_batch_size
        tokens = torch.stack([script().sample(first + place, args) for place in range(args.global_batch_size)])
        logits = reference(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if not gradients:
            gradients = {name.replace(".default", ""): p.grad.clone() for name, p in trained.items()}
        torch.nn.utils.clip_grad_norm_(trained.values(), args.clip_grad)
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, adapter_tensors(reference)


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    model = make_model(folder / "model", "llama", tied=False, vocab_size=132)
    make_adapter(model, folder / "start", target_modules=TARGETS)
    return folder, train_with_peft(model, folder / "start")


@pytest.mark.parametrize(
    ("layout", "ranks", "flags"),
    [
        ({"tensor": 2}, 2, []),
        ({"pipeline": 2}, 2, []),
        ({"tensor": 2, "pipeline": 2}, 4, []),
        ({}, 2, ["--overlap-grad-reduce"]),
        ({"tensor": 2}, 4, ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]),
    ],
    ids=["TP2", "PP2", "TP2xPP2", "DP2", "TP2xDP2-distributed"],
)
def test_mcores_own_loop_trains_as_peft(truth, layout, ranks, flags):
    folder, (losses, gradients, after) = truth
    results = run_ranks(train_with_mcore, ranks, str(folder / "model"), str(folder), layout, flags)
    assert all(other[0] == pytest.approx(losses, abs=1e-5) for other in results)
    _, by_name, adapter = results[0]
    assert by_name.keys() == gradients.keys() and adapter.keys() == after.keys()
    if "--use-distributed-optimizer" not in flags:  # the distributed optimizer leaves each rank only a part of the sum
        errors = {name: relative_error(by_name[name], exact) for name, exact in gradients.items()}
        assert max(errors.values()) < 1e-4, max(errors, key=errors.get)
    errors = {name: relative_error(adapter[name], exact) for name, exact in after.items()}
    assert max(errors.values()) < 1e-4, max(errors, key=errors.get)


def run_script(*args: str) -> list[float]:
    return script().main(list(args))


@pytest.mark.parametrize(
    ("saved", "loaded", "ranks", "flags"),
    [
        ({"tensor": 2, "pipeline": 2}, {}, 4, []),
        pytest.param({"pipeline": 2}, {"tensor": 2}, 2, ["--bf16"], marks=pytest.mark.long),
        pytest.param({}, {"tensor": 2}, 2, ["--use-distributed-optimizer"], marks=pytest.mark.long),
        ({"tensor": 2}, {}, 2, ["--bf16", "--use-distributed-optimizer"]),
    ],
    ids=["fp32", "bf16", "fp32-distributed", "bf16-distributed"],
)
def test_mcores_distributed_checkpoint_goes_on_here_and_at_another_layout(tmp_path, saved, loaded, ranks, flags):
    model = make_model(tmp_path / "model", "llama", tied=False, vocab_size=132)
    flags = [*flags, "--lora-target-modules", *TARGETS, "--save-adapter"]
    keep = ["--save", tmp_path / "checkpoints", "--save-interval", 2]
    straight, *_ = run_ranks(run_script, ranks, *arguments(model, saved, *flags, tmp_path / "straight", *keep))
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("2")
    go_on = ["--load", tmp_path / "checkpoints"]
    here, *_ = run_ranks(run_script, ranks, *arguments(model, saved, *flags, tmp_path / "here", *go_on))
    elsewhere, *_ = run_ranks(run_script, ranks, *arguments(model, loaded, *flags, tmp_path / "elsewhere", *go_on))
    assert here == straight[2:]
    assert weights(tmp_path / "here") == weights(tmp_path / "straight")
    bound = 2e-2 if "--bf16" in flags else 1e-5
    assert elsewhere == pytest.approx(straight[2:], abs=bound)
    for name, exact in tensors(tmp_path / "straight").items():
        assert relative_error(tensors(tmp_path / "elsewhere")[name].float(), exact.float()) < 10 * bound, name
    folder = next((tmp_path / "checkpoints").glob("iter_*"))
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size < 3e6  # adapter and moments, without the base


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    return load(weights(folder))


def load_late(model: str, folder: str, flags: list[str]) -> dict[str, float]:
    """Load another adapter after an optimizer has updated the first; return how far an update at rate 0 moves it."""
    example, other = script(), Path(folder) / "other"
    args = parsed(model, {}, "--bf16", "--lora-target-modules", *TARGETS, "--weight-decay", 0, *flags)
    device = example.initialize(args)
    chunks, adapter = example.get_model(args, device)
    optimizer, scheduler = example.get_optimizer(args, chunks)
    example.train_step(0, args, chunks, optimizer, scheduler, device)
    before = {name: tensor.clone() for name, tensor in adapter.export()}
    try:
        adapter.load(other)
    except AdapterError as error:
        refused = str(error)
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.export())
    adapter.load(other, optimizer)
    loaded = {name: tensor.clone() for name, tensor in adapter.export()}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.param_groups:
            group["max_lr"] = group["min_lr"] = 0.0
    scheduler.max_lr = scheduler.min_lr = 0.0
    scheduler.step(0)
    example.train_step(1, args, chunks, optimizer, scheduler, device)
    moved = max(float((tensor - loaded[name]).abs().max()) for name, tensor in adapter.export())
    changed = max(float((tensor - before[name]).abs().max()) for name, tensor in loaded.items())
    dist.destroy_process_group()
    return {"refused": refused, "moved": moved, "changed": changed}


@pytest.mark.parametrize("flags", [[], ["--use-distributed-optimizer"]], ids=["Float16Optimizer", "distributed"])
def test_an_adapter_loaded_under_an_optimizer_stays_where_it_is(tmp_path, flags):
    model = make_model(tmp_path / "model", "llama", tied=False, vocab_size=132)
    make_adapter(model, tmp_path / "other", target_modules=TARGETS, r=8, lora_alpha=16)
    for result in run_ranks(load_late, 2, str(model), str(tmp_path), flags):
        assert result["moved"] == 0.0
        assert result["changed"] > 0.1
        assert "adapter.load(path, optimizer)" in result["refused"]


def keep_experts(folder: str, layout: dict, save: bool) -> dict[str, torch.Tensor]:
    """Save or load the adapter of a mixture as a distributed checkpoint; return the whole adapter."""
    from megatron.core import dist_checkpointing

    model = build(Path(folder), layout, "float32")
    state = adapters_of(model.chunks[0].sharded_state_dict())
    if save:
        dist_checkpointing.save(state, f"{folder}/checkpoint")
    else:
        with torch.no_grad():
            for _, parameter in model.adapter.parameters():
                parameter.zero_()
        model.chunks[0].load_state_dict(dist_checkpointing.load(state, f"{folder}/checkpoint"), strict=False)
    return {name: tensor.clone() for name, tensor in model.export_weights(adapter_only=True)}


def test_experts_adapters_change_places_in_a_distributed_checkpoint(tmp_path):
    make_model(tmp_path / "model", "qwen3_moe", tied=True)
    (tmp_path / "checkpoint").mkdir()
    saved, _ = run_ranks(keep_experts, 2, str(tmp_path), {"data": 2, "expert": 2}, True)
    for read in run_ranks(keep_experts, 2, str(tmp_path), {"tensor": 2, "expert_tensor": 2}, False):
        assert read.keys() == saved.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in saved.items())
    assert any("experts" in name for name in saved)


@pytest.mark.long
def test_the_readmes_commands_run_as_written(tmp_path):
    blocks = re.findall(r"^    (?:.*\n    )*.*$", (EXAMPLE / "README.md").read_text(), flags=re.MULTILINE)
    folder = Path(sys.executable).parent
    for block in blocks:
        command = block.replace("/tmp/plugin", str(tmp_path)).replace("torchrun", "torchrun --standalone")
        environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(EXAMPLE.parents[1])}
        subprocess.run(command, shell=True, check=True, cwd=EXAMPLE.parents[1], env=environment, timeout=300)
    model = load_reference(tmp_path / "model", None)
    before, after = (loss_of(load_reference(tmp_path / "model", tmp_path / name)) for name in ("adapter", "adapter-9"))
    assert loss_of(model) > before > after


def loss_of(model: torch.nn.Module) -> float:
    args = parsed("", {}, "--seq-length", 32)
    tokens = torch.stack([script().sample(index, args) for index in range(8)])
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
