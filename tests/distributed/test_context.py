# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: attention over packed sequences, metrics, dropout, resume; and that each parity row can fail."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megarl.verify.bounds import ENTROPY, GRADIENTS, LOGPROBS
from megarl.verify.cases import Place
from megarl.verify.compare import relative_error
from megarl.verify.inputs.samples import make_samples
from megarl.verify.ranks import Stage, each_layout, train
from megarl.verify.reference.reference_runs import make_truth, run_shared
from tests.distributed.test_checkpoint import resume, save_and_go_on
from tests.helpers.cases import make_case, outside, place
from tests.helpers.models import SHAPE, make_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import build

# Lengths above and below 2 * CP, and of one token.
LENGTHS = (37, 1, 5, 3, 64, 8, 1, 2)
HEADS, KV_HEADS, DIM = 4, 2, 8
CPU = torch.device("cpu")


def make_inputs() -> list[torch.Tensor]:
    """Return query, key, value and the output's gradient of all sequences, without padding, float64."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(sum(LENGTHS), n, DIM, dtype=torch.float64, generator=generator) for n in heads]


def attention_of_one_process() -> list[torch.Tensor]:
    """Return output and gradients of query, key and value, computed by SDPA sequence by sequence."""
    *inputs, gradient = make_inputs()
    leaves = [tensor.requires_grad_() for tensor in inputs]
    parts = zip(*(leaf.transpose(0, 1).split(LENGTHS, dim=1) for leaf in leaves), strict=True)
    outs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in parts]
    out = torch.cat(outs, dim=1).transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def attention_of_ranks(sizes: list[int]) -> dict[int, Any]:
    """On each rank, return its part of the same and its positions, for each CP size. Padding holds large numbers."""
    from megarl.model.layers.attention.core import PackedAttention, PackedSequences
    from megarl.model.layers.attention.zigzag import padded_length, rank_tokens

    dist.init_process_group("gloo")
    results = {}
    for size in sizes:
        group = dist.new_group(list(range(size)))
        if dist.get_rank() >= size:
            continue
        lengths = tuple(padded_length(length, size) for length in LENGTHS)
        starts = np.cumsum([0, *lengths])
        real = np.concatenate([start + np.arange(n) for start, n in zip(starts, LENGTHS, strict=False)])
        held = rank_tokens(lengths, size, dist.get_rank())
        inputs = []
        for tensor in make_inputs():
            whole = torch.full((starts[-1], *tensor.shape[1:]), 50.0, dtype=torch.float64)
            whole[real] = tensor
            inputs.append(whole[held][:, None])
        *inputs, gradient = inputs
        gradient[~np.isin(held, real)] = 0.0  # nothing that trains depends on padding
        leaves = [tensor.requires_grad_() for tensor in inputs]
        packed = PackedSequences.from_lengths(lengths, CPU, context=size, context_rank=dist.get_rank())
        attention = PackedAttention(None, pg_collection=SimpleNamespace(cp=group))
        out = attention(*leaves, None, packed_seq_params=packed)
        gradients = torch.autograd.grad(out, leaves, gradient.flatten(2))
        results[size] = {
            "place": np.searchsorted(real, held[np.isin(held, real)]),
            "values": [t.detach()[np.isin(held, real), 0] for t in (out.unflatten(2, (HEADS, DIM)), *gradients)],
        }
    dist.destroy_process_group()
    return results


def test_attention_and_its_gradients_are_those_of_one_process():
    expected = attention_of_one_process()
    sizes = [1, 2, 3, 4]
    ranks = run_ranks(attention_of_ranks, max(sizes), sizes)
    for size in sizes:
        gathered = [torch.zeros_like(tensor) for tensor in expected]
        covered = np.zeros(sum(LENGTHS), dtype=int)
        for result in ranks[:size]:
            covered[result[size]["place"]] += 1
            for whole, part in zip(gathered, result[size]["values"], strict=True):
                whole[result[size]["place"]] = part
        assert (covered == 1).all()
        for name, ours, theirs in zip(("output", "query", "key", "value"), gathered, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=f"CP{size} {name}")


# A removed part of context parallelism -> the row that must then fail, and one that must still pass.
MUTATIONS = {
    "nothing": ("", LOGPROBS),
    "the gradient's sum over CP": (GRADIENTS, LOGPROBS),
    "the keys' gradient from other ranks": (GRADIENTS, LOGPROBS),
    "the token weights of the whole step": (GRADIENTS, LOGPROBS),
    "the metrics' sum over CP": (ENTROPY, LOGPROBS),
    "the positions of a rank's tokens": (LOGPROBS, ""),
}


def remove(name: str, patch: pytest.MonkeyPatch) -> None:
    """Break one part of context parallelism on this rank."""
    from megarl.model.layers import gpt
    from megarl.model.layers.attention import core as attention
    from megarl.model.optimizer import adapter_optimizer
    from megarl.model.step import micro_batch, schedule

    if name == "the gradient's sum over CP":
        patch.setattr(adapter_optimizer, "finalize_gradients", lambda *args, **kwargs: None)
    if name == "the keys' gradient from other ranks":

        def keep_own(local: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
            local.copy_(whole.chunk(group.size())[group.rank()])

        patch.setattr(attention.dist, "reduce_scatter_tensor", keep_own)
    if name == "the token weights of the whole step":
        inputs_of = micro_batch._loss_inputs

        def weigh_by_own_tokens(batch: Any, indices: Any, chosen: Any, kept: Any) -> Any:
            inputs = inputs_of(batch, indices, chosen, kept)
            everyones = sum(int(sample.response_mask.sum()) for sample in chosen)
            share = everyones / batch.context / max(len(kept), 1)
            return inputs | {"weights_T": inputs["weights_T"] * share}

        patch.setattr(micro_batch, "_loss_inputs", weigh_by_own_tokens)
    if name == "the metrics' sum over CP":
        reduce = schedule.Stepper._reduce_metrics

        def reduce_over_data(self: Any, outputs: Any) -> Any:
            patch.setattr(self, "groups", dataclasses.replace(self.groups, data_context=self.groups.data))
            return reduce(self, outputs)

        patch.setattr(schedule.Stepper, "_reduce_metrics", reduce_over_data)
    if name == "the positions of a rank's tokens":
        preprocess = gpt.PackedGPTModel._preprocess

        def count_within_rank(self: Any, *args: Any, position_ids: Any, **kwargs: Any) -> Any:
            lengths = kwargs["packed_seq_params"].query_lengths
            counted = torch.cat([torch.arange(length) for length in lengths])
            return preprocess(self, *args, position_ids=counted[None], **kwargs)

        patch.setattr(gpt.PackedGPTModel, "_preprocess", count_within_rank)


def train_mutants(here: Place) -> dict[str, dict[str, str]]:
    """On each rank, return `megarl verify`'s findings outside the bounds at CP2, with each part removed in turn."""
    results = {}
    for (stage, groups), name in zip(each_layout([Stage(here)] * len(MUTATIONS)), MUTATIONS, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            remove(name, patch)
            results[name] = outside(train(stage.place, groups))
    return results


def test_what_context_parallelism_needs_fails_a_row_when_removed(tmp_path):
    case = make_case(tmp_path, "qwen3", family="qwen3", tied=False)
    run_shared(make_truth, [case])
    for name, failed in run_ranks(train_mutants, 2, place(case, "CP2", {"context": 2}))[0].items():
        fails, passes = MUTATIONS[name]
        assert passes not in failed, (name, failed)
        assert fails in failed if fails else not failed, (name, failed)


def metrics_of_ranks(folder: str, layout: dict[str, int]) -> dict:
    """Return GRPO's metrics with all three other logprobs, and the fewest response tokens of a micro-batch."""
    from megarl.config import LossConfig
    from megarl.loss import build_loss
    from megarl.model.step.micro_batch import micro_batches
    from megarl.types import Sample

    model = build(Path(folder), layout)
    noise = np.random.default_rng(1)
    samples = []
    for sample in make_samples(12, SHAPE["vocab_size"], seed=3, longest=24):
        values = noise.normal(-5.0, 0.5, (3, int(sample.response_mask.sum()))).astype(np.float32)
        samples.append(Sample(sample.tokens, sample.response_mask, sample.advantage, *values))
    batch = model.pack(samples, np.full(12, 0.05))
    metrics = model.evaluate(batch, build_loss(LossConfig(kl_coef=0.1)))
    # Ratios and weights of whole sequences, whose tokens the ranks share.
    settings = {"importance_level": "sequence", "importance_mode": "mask", "clip_low": 0.9, "clip_high": 1.0}
    by_sequence = model.forward_backward(batch, build_loss(LossConfig(name="gspo", **settings)))
    gradients = model.gradients()
    items = micro_batches(batch, model.groups.data_rank, CPU, context_rank=model.groups.context_rank)
    whole = {"metrics": dict(metrics), "by sequence": dict(by_sequence), "gradients": gradients}
    return whole | {"fewest": min(len(item.labels_R) for item in items)}


def test_metrics_do_not_depend_on_cp_and_ranks_without_response_tokens_take_part(tmp_path):
    make_model(tmp_path / "model", "llama", tied=True)
    [alone] = run_ranks(metrics_of_ranks, 1, str(tmp_path), {})
    ranks = run_ranks(metrics_of_ranks, 4, str(tmp_path), {"context": 4})
    assert min(rank["fewest"] for rank in ranks) == 0
    assert {"loss", "kl", "entropy", "mismatch_mean", "mismatch_max", "ratio_max", "clip_low"} <= alone[
        "metrics"
    ].keys()
    for rank in ranks:
        for name in ("metrics", "by sequence"):
            assert rank[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-9)
        for name, gradient in alone["gradients"].items():
            assert relative_error(rank["gradients"][name], gradient) < 2e-6, name
    assert 0 < alone["by sequence"]["correction_capped"] < 1
    assert any(gradient.any() for gradient in alone["gradients"].values())


def draw_masks(layouts: list[dict[str, int]]) -> list[Any]:
    """On each rank, return its coordinates, and random numbers of the default state and of mcore's tracker."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megarl.config import ParallelConfig
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import init_groups, leave_layout

    device, results = pick_device("auto"), []
    for layout in layouts:
        leave_layout()
        groups = init_groups(ParallelConfig(**layout), device, seed=3)
        with get_cuda_rng_tracker().fork():
            tracked = torch.rand(4).tolist()
        place = (groups.context_rank, groups.data_rank, groups.pipeline_rank)
        results.append({"place": place, "default": tuple(torch.rand(4).tolist()), "tracked": tuple(tracked)})
    return results


def test_dropout_is_drawn_alike_on_tensor_ranks_only():
    layouts = [{"tensor": 2, "context": 2}, {"context": 2, "data": 2}, {"pipeline": 2, "context": 2}]
    for ranks in zip(*run_ranks(draw_masks, 4, layouts), strict=True):
        by_place = {(rank["place"], rank["default"]) for rank in ranks}
        places = {rank["place"] for rank in ranks}
        assert len(by_place) == len(places) == len({rank["default"] for rank in ranks})
        assert len({rank["tracked"] for rank in ranks} | {rank["default"] for rank in ranks}) == len(ranks) + len(
            places
        )


def save_both(folder: str) -> dict[str, dict]:
    """Save two runs at CP2: one in bf16 with dropout, one in fp32 without."""
    return {dtype: save_and_go_on(f"{folder}/{dtype}", {"context": 2}, dtype) for dtype in ("bfloat16", "float32")}


def resume_both(folder: str) -> dict[str, dict]:
    """Resume the first run at the same layout, the second at TP2."""
    from megarl.parallel.groups import leave_layout

    same = resume(f"{folder}/bfloat16", {"context": 2}, "bfloat16")
    leave_layout()
    return {"bfloat16": same, "float32": resume(f"{folder}/float32", {"tensor": 2}, "float32")}


def test_run_with_dropout_resumes_bit_for_bit_and_another_layout_goes_on(tmp_path):
    for dtype in ("bfloat16", "float32"):
        make_model(tmp_path / dtype / "model", "qwen3", tied=True)
    straight = run_ranks(save_both, 2, str(tmp_path))
    resumed = run_ranks(resume_both, 2, str(tmp_path))
    for before, after in zip(straight, resumed, strict=True):
        expected, actual = before["bfloat16"]["state"], after["bfloat16"]["state"]
        assert expected.keys() == actual.keys()
        assert not [name for name in expected if not torch.equal(expected[name], actual[name])]
        moved = after["float32"]["whole"]
        assert max(relative_error(moved[n], tensor) for n, tensor in before["float32"]["whole"].items()) < 1e-4
