# SPDX-License-Identifier: Apache-2.0
"""Check that `megarl verify` finds each planted mutation, in the expected row and place; and run the command itself.

Each mutation breaks megarl inside its ranks, not in the reference's processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.verify.bounds import (
    ADAPTER,
    BASE_LOGPROBS,
    BOUNDS,
    EACH_GRADIENT,
    FLOAT32_ONLY,
    GRADIENT_NORM,
    GRADIENTS,
    LOGPROBS,
    UPDATE,
)
from megarl.verify.run import verify_places
from tests.helpers.cases import FLOAT32_ROWS, make_case, place
from tests.helpers.models import make_model

ROOT = Path(__file__).parents[2]


def drop_sequence_parallel_sum():
    """Replicated matrices keep the gradient of their own rank's tokens only."""
    from megarl.lora.layers import parallel_linear

    original = parallel_linear.mark_parameter
    parallel_linear.mark_parameter = lambda parameter, split, sequence_parallel: original(parameter, split, False)


def drop_rope_restart():
    """Positions run on over a pack up to the end of a RoPE table of 17, and start again there.

    Running on alone would change nothing: RoPE is relative, and sequences do not attend to each other.
    """
    from megarl.model.layers.gpt import PackedGPTModel

    original = PackedGPTModel._preprocess

    def run_on(self, *args, **kwargs):
        positions = kwargs["position_ids"]
        running = positions.new_tensor(range(positions.numel())) % 17
        return original(self, *args, **(kwargs | {"position_ids": running.view_as(positions)}))

    PackedGPTModel._preprocess = run_on


def scale_one_adapter():
    """One linear's adapter is scaled by 1.01."""
    from megarl.lora import apply

    original = apply.rank_and_scaling

    def scaled(config, name):
        rank, scaling = original(config, name)
        return rank, scaling * (1.01 if name == "model.layers.2.self_attn.k_proj" else 1.0)

    apply.rank_and_scaling = scaled


def forget_expert_scaling():
    """Adapters of experts are scaled as if alpha were r."""
    from megarl.lora import apply

    original = apply.rank_and_scaling

    def unscaled(config, name):
        rank, scaling = original(config, name)
        return rank, 1.0 if ".experts." in name else scaling

    apply.rank_and_scaling = unscaled


def coarsen_norms():
    """Norms return eight-bit numbers."""
    import torch

    from megarl.model.layers.gpt import RMSNorm

    original = RMSNorm.forward
    RMSNorm.forward = lambda self, hidden: original(self, hidden).to(torch.float8_e4m3fn).to(hidden.dtype)


def clamp_positions():
    """RoPE's table ends at 64."""
    from megarl.model.layers.gpt import PackedGPTModel

    original = PackedGPTModel._preprocess

    def clamped(self, *args, **kwargs):
        return original(self, *args, **(kwargs | {"position_ids": kwargs["position_ids"].clamp(max=63)}))

    PackedGPTModel._preprocess = clamped


def ignore_temperature():
    """Logits are not divided by the temperature."""
    from megarl.model.step.schedule import Stepper

    original = Stepper.__init__
    Stepper.__init__ = lambda self, *args, **kwargs: original(self, *args, **(kwargs | {"temperature": 1.0}))


def weigh_by_the_neighbour():
    """Each sample's logprobs get the weight of the sample before it."""
    import numpy as np

    from megarl.model.megatron_model import MegatronModel

    original = MegatronModel.pack

    def pack(self, samples, weights_S=None, step_tokens=None):
        return original(self, samples, None if weights_S is None else np.roll(weights_S, 1), step_tokens)

    MegatronModel.pack = pack


def forget_clipping():
    """Updates use the unclipped gradient."""
    from megarl.model.optimizer import flat_part, fused_adamw, tensor_part

    def unclipped(adamw, norm, lr, max_norm):
        fused_adamw.clip_and_step(adamw, norm, lr, 0.0)

    flat_part.clip_and_step = tensor_part.clip_and_step = unclipped


def forget_weight_decay():
    """The optimizer has no weight decay."""
    from megarl.model.optimizer import adapter_optimizer

    original = adapter_optimizer.OptimizerConfig
    adapter_optimizer.OptimizerConfig = lambda **settings: original(**(settings | {"weight_decay": 0.0}))


def zero_an_experts_gradient():
    """One matrix of one expert gets no gradient."""
    from megarl.model.optimizer.adapter_optimizer import AdapterOptimizer

    original = AdapterOptimizer.reduce_gradients
    name = "base_model.model.model.layers.1.mlp.experts.2.down_proj.lora_A.weight"

    def reduce(self):
        original(self)
        if name in self.parameters:
            self.parameters[name].main_grad.zero_()

    AdapterOptimizer.reduce_gradients = reduce


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Tiny models, with their truths once these are computed."""
    folder = tmp_path_factory.mktemp("verify")
    return {family: make_case(folder, family, family=family, tied=False) for family in ("qwen3", "qwen3_moe")}


def failed_rows(report):
    return {row.name for row in report.rows if not row.passed}


@pytest.mark.parametrize(
    ("family", "mutation", "layouts", "failed", "passed", "lines"),
    [
        (
            "qwen3",
            drop_sequence_parallel_sum,
            {"TP2+SP": {"tensor": 2}},
            {GRADIENTS, GRADIENT_NORM, ADAPTER, UPDATE},
            {LOGPROBS, BASE_LOGPROBS},
            [
                "first difference: none, all 59 traced outputs agree",
                "first gradient, backwards: model.layers.3.mlp.down_proj.lora_B ",
            ],
        ),
        (
            "qwen3",
            drop_rope_restart,
            {"PP2": {"pipeline": 2}},
            {LOGPROBS, BASE_LOGPROBS, GRADIENTS},
            set(),
            [
                "first difference: input of model.layers.0.self_attn.o_proj ",
                "first gradient, backwards: model.layers.3.mlp.down_proj.lora_B ",
            ],
        ),
        (
            "qwen3",
            scale_one_adapter,
            {"TP2": {"tensor": 2, "sequence": False}},
            {LOGPROBS, GRADIENTS},
            {BASE_LOGPROBS},
            ["first difference: model.layers.2.self_attn.k_proj ", "first gradient, backwards: "],
        ),
        (
            "qwen3_moe",
            forget_expert_scaling,
            {"EP2xDP2": {"expert": 2, "data": 2}},
            {LOGPROBS, GRADIENTS},
            {BASE_LOGPROBS},
            ["first difference: model.layers.0.mlp ", "first gradient, backwards: "],
        ),
    ],
    ids=["SP sum", "RoPE restart", "one scaling", "expert scaling"],
)
def test_a_mutation_fails_the_row_that_it_breaks_and_is_located(
    cases, family, mutation, layouts, failed, passed, lines
):
    here = [place(cases[family], name, layout) for name, layout in layouts.items()]
    [report] = verify_places(here, prepare=mutation)
    assert failed <= failed_rows(report)
    assert not passed & failed_rows(report)
    for line, expected in zip(report.differences, lines, strict=True):
        assert line.startswith(expected), report.differences


@pytest.mark.parametrize(
    ("mutation", "failed", "passed"),
    [
        (clamp_positions, {LOGPROBS, BASE_LOGPROBS, GRADIENTS}, set()),
        pytest.param(ignore_temperature, {LOGPROBS, BASE_LOGPROBS, GRADIENTS}, set(), marks=pytest.mark.long),
        (weigh_by_the_neighbour, {GRADIENTS, ADAPTER, UPDATE}, {LOGPROBS, BASE_LOGPROBS}),
        pytest.param(forget_clipping, {ADAPTER, UPDATE}, {LOGPROBS, GRADIENTS}, marks=pytest.mark.long),
        (forget_weight_decay, {ADAPTER, UPDATE}, {LOGPROBS, GRADIENTS}),
    ],
)
def test_a_setting_that_is_ignored_fails_its_rows(cases, mutation, failed, passed):
    [report] = verify_places([place(cases["qwen3"], "TP1", {})], prepare=mutation)
    assert failed <= failed_rows(report)
    assert not passed & failed_rows(report)


@pytest.mark.long
def test_in_bf16_a_lost_gradient_of_one_expert_fails_its_row(tmp_path):
    case = make_case(tmp_path, "moe", dtype="bfloat16", family="qwen3_moe", tied=False, num_hidden_layers=2)
    here = [place(case, "EP2xDP2", {"expert": 2, "data": 2})]
    [report] = verify_places(here)
    assert report.passed, report.rows
    [lost] = verify_places(here, prepare=zero_an_experts_gradient)
    assert failed_rows(lost) == {EACH_GRADIENT}, lost.rows
    [row] = [row for row in lost.rows if row.name == EACH_GRADIENT]
    assert row.worst.startswith("model.layers.1.mlp.experts.2.down_proj.lora_A")


def test_in_bf16_hugging_faces_bf16_is_the_bound(tmp_path):
    case = make_case(tmp_path, "llama", dtype="bfloat16", family="llama", tied=True, num_hidden_layers=2)
    here = [place(case, "TP2+SP", {"tensor": 2})]
    [report] = verify_places(here)
    assert [row.name for row in report.rows] == [row for row in BOUNDS if row not in FLOAT32_ONLY]
    assert report.passed, report.rows
    [coarse] = verify_places(here, prepare=coarsen_norms)
    assert {LOGPROBS, BASE_LOGPROBS, GRADIENTS} <= failed_rows(coarse)
    assert coarse.differences[0].startswith("first difference: model.layers.0.input_layernorm ")


def run_command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "megarl.cli.main", "verify", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=280,
    )


def test_the_command_prints_json_and_nothing_else_on_standard_output(tmp_path):
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    done = run_command(str(model), "parallel.tensor=2", "lora.r=4", "lora.target_modules=[q_proj, down_proj]", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    verdict = json.loads(done.stdout)
    assert verdict["pass"] is True
    assert [row["name"] for row in verdict["rows"]] == FLOAT32_ROWS
    assert all(row.keys() == {"name", "worst", "error", "bound", "pass"} and row["pass"] for row in verdict["rows"])


TRANSFORMERS = ["transformers", "transformers DP2", "transformers DP2+shards"]


def test_the_matrix_runs_every_layout_that_the_checks_allow(tmp_path):
    model = make_model(tmp_path / "model", "qwen2", tied=True, num_hidden_layers=6)
    done = run_command(str(model), "lora.r=4", "--matrix", "--ranks", "2", "--out", str(tmp_path / "matrix.md"))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "matrix.md").read_text().splitlines()
    layouts = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.endswith(" | yes |")]
    assert sorted(layouts) == sorted(["TP1", "DP2", "CP2", "TP2", "TP2+SP", "PP2", "PP2xVPP2", *TRANSFORMERS])
    assert not [line for line in lines if line.endswith(" | NO |") or line.startswith("Refused: ")]
    assert done.stdout.splitlines()[-len(lines) :] == lines
