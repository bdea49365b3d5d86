# SPDX-License-Identifier: Apache-2.0
"""Leave samples out of verify in which two experts tie within rounding: either choice is correct."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megarl.verify.cases import Case
from megarl.verify.reference.hf_peft import load_reference, logprobs_of
from megarl.verify.reference.reference_runs import make_truth
from megarl.verify.reference.router_margins import NEAREST, RouterMargins, _routes
from megarl.verify.run import verify_places
from tests.helpers.cases import check, make_case, place

SAMPLE, TOKEN = 3, 2
ROUTER = "model.layers.0.mlp.gate.weight"


def routed(case: Case, sample: int) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Return the first layer's router, its input and its logits ``[T, experts]`` for one sample, in float64."""
    model, seen = load_reference(case.model, case.adapter, torch.float64), []
    router = next(module for module in model.modules() if _routes(module))
    hook = router.register_forward_hook(
        lambda module, args, output: seen.append((args[0].detach(), output[0].detach()))
    )
    logprobs_of(model, case.samples()[sample])
    hook.remove()
    [(inputs, logits)] = seen
    return router, inputs.reshape(len(logits), -1), logits


def make_tie(case: Case) -> None:
    """Change the first router so that one token's last chosen and best rejected expert tie."""
    router, inputs, logits = routed(case, SAMPLE)
    order = logits[TOKEN].argsort(descending=True)
    chosen, rejected = order[router.top_k - 1], order[router.top_k]
    file = next(Path(case.model).glob("*.safetensors"))
    tensors = load_file(file)
    missing = logits[TOKEN, chosen] - logits[TOKEN, rejected]
    tensors[ROUTER][rejected] += (missing * inputs[TOKEN] / inputs[TOKEN].square().sum()).float()
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_sample_whose_experts_tie_is_left_out(tmp_path):
    case = make_case(tmp_path, "tie", family="qwen3_moe", tied=False)
    make_tie(case)
    before = case.samples()
    router, _, logits = routed(case, SAMPLE)
    ranked = logits.sort(descending=True).values
    gaps = (ranked[:, router.top_k - 1] - ranked[:, router.top_k]) / logits.abs().amax(-1)
    assert gaps[TOKEN] < NEAREST / 10
    model = load_reference(case.model, case.adapter, torch.float64)
    with RouterMargins().listen(model) as heard:
        for sample in before:
            logprobs_of(model, sample)
    assert heard.smallest[tuple(before[SAMPLE].tokens.tolist())] <= gaps.min()
    assert SAMPLE not in heard.without_ties(before)

    make_truth(case)
    after = {tuple(sample.tokens.tolist()) for sample in case.samples()}
    assert tuple(before[SAMPLE].tokens.tolist()) not in after
    assert len(before) / 2 <= len(after) < len(before)
    check(verify_places([place(case, "TP1", {})]))
