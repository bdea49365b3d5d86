# SPDX-License-Identifier: Apache-2.0
"""Check that `megarl verify` finds errors in what is saved after correct training, and names the tensor."""

from megarl.verify.bounds import BASE_WEIGHTS, CHECKPOINT, EXPORTED_WEIGHTS, MERGED_LOAD, MERGED_WEIGHTS, PEFT_LOAD
from megarl.verify.run import verify_places
from tests.helpers.cases import FLOAT32_ROWS, make_case, place

SAVED = {PEFT_LOAD, MERGED_LOAD, MERGED_WEIGHTS, EXPORTED_WEIGHTS, BASE_WEIGHTS, CHECKPOINT}


def lose_a_shard():
    """The saved adapter lacks the second rank's part of one tensor."""
    from megarl.lora.adapter import LoraAdapter
    from megarl.lora.files import peft_folder

    def snapshot(self, *experts):
        tensors, config = {name: tensor.clone() for name, tensor in self.export()}, self.adapter_config()
        lost = tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
        lost[len(lost) // 2 :] = 0
        return lambda path: peft_folder.write(path, tensors, config)

    LoraAdapter.snapshot = snapshot


def forget_a_merge():
    """One weight of the merged model is the base's."""
    from megarl.lora.adapter import LoraAdapter

    original = LoraAdapter.merged

    def merged(self, tensors):
        base = {tensor.name: tensor for tensor in tensors}
        return [base[t.name] if t.name == "model.layers.0.mlp.up_proj.weight" else t for t in original(self, tensors)]

    LoraAdapter.merged = merged


def merge_twice():
    """The command line's export adds the adapter twice to one weight."""
    from megarl.lora import merge

    original = merge._merged

    def merged(name, tensor, *args):
        once = original(name, tensor, *args)
        return original(name, once, *args) if name == "model.layers.2.mlp.gate_proj.weight" else once

    merge._merged = merged


def touch_the_base():
    """One exported base weight has a wrong element, and another, before it, a NaN."""
    from megarl.model.megatron_model import MegatronModel

    original = MegatronModel.export_weights

    def export(self, adapter_only):
        for name, tensor in original(self, adapter_only):
            if name == "model.layers.3.mlp.down_proj.weight":
                tensor = tensor.clone()
                tensor[0, 0] += 1e-6
            elif name == "model.layers.1.self_attn.k_proj.weight":
                tensor = tensor.clone()
                tensor[0, 0] = float("nan")
            yield name, tensor

    MegatronModel.export_weights = export


def restore_a_moment_wrongly():
    """One tensor's second moment is restored four times as large."""
    from megarl.model.optimizer.adapter_optimizer import AdapterOptimizer

    original, name = AdapterOptimizer.restore, "base_model.model.model.layers.2.self_attn.o_proj.lora_A.weight"

    def restore(self, steps, main, moments):
        second = moments["exp_avg_sq"]
        wrong = {name: 4 * second[name]} if name in second else {}
        return original(self, steps, main, moments | {"exp_avg_sq": second | wrong})

    AdapterOptimizer.restore = restore


def break_all_that_is_saved():
    """Break everything that is saved; each break affects other rows."""
    lose_a_shard()
    forget_a_merge()
    merge_twice()
    touch_the_base()
    restore_a_moment_wrongly()


def test_what_is_saved_wrongly_fails_its_row_and_is_named(tmp_path):
    case = make_case(tmp_path, "qwen3", family="qwen3", tied=False)
    [report] = verify_places([place(case, "TP2+SP", {"tensor": 2})], prepare=break_all_that_is_saved)
    rows = {row.name: row for row in report.rows}
    assert {name for name, row in rows.items() if not row.passed} == SAVED
    assert list(rows) == FLOAT32_ROWS
    assert rows[BASE_WEIGHTS].worst == "model.layers.1.self_attn.k_proj.weight"
    assert rows[CHECKPOINT].worst == "at PP2xVPP2: model.layers.2.self_attn.o_proj.lora_A.weight"
    expected = [
        "first difference: none, all 59 traced outputs agree",
        "first tensor of the saved adapter: model.layers.1.self_attn.q_proj.lora_B (error ",
        "first merged weight: model.layers.0.mlp.up_proj (error ",
        "first exported weight: model.layers.2.mlp.gate_proj (error ",
        "first tensor after the checkpoint: model.layers.2.self_attn.o_proj.lora_A (error ",
    ]
    for line, start in zip(report.differences, expected, strict=True):
        assert line.startswith(start), report.differences
