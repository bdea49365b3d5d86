# SPDX-License-Identifier: Apache-2.0
"""Check how an adapter of a fused linear is cut into vLLM's parts."""

from types import SimpleNamespace

import torch

from megarl.checkpoint_engine.receiver.fused import cut_rows, fuse_shapes, fused_name, fused_parts

QKV = ["l.q_proj", "l.k_proj", "l.v_proj"]
SHAPES = {"l.q_proj": (8, 6), "l.k_proj": (8, 2), "l.v_proj": (8, 2), "l.o_proj": (6, 8)}


def test_a_fused_linear_takes_the_place_of_its_parts() -> None:
    inner = SimpleNamespace(packed_modules={"l.qkv_proj": QKV, "l.experts": []})
    assert fused_parts(inner, ["l.o_proj", *QKV]) == {}
    fused = fused_parts(inner, ["l.o_proj", "l.qkv_proj"])
    assert fused == {"l.qkv_proj": QKV}
    assert fuse_shapes(SHAPES, fused) == {"l.qkv_proj": (8, 10), "l.o_proj": (6, 8)}
    b = torch.arange(20.0).view(10, 2)
    assert torch.equal(torch.cat(list(cut_rows(b, [6, 2, 2]))), b)
    assert [len(rows) for rows in cut_rows(b, [6, 2, 2])] == [6, 2, 2]


def test_a_fused_linear_whose_order_is_not_known_is_none() -> None:
    """Falcon and GPT-NeoX mix q, k and v head by head."""
    assert fused_name("l.query_key_value", QKV) is None
    assert fused_name("l.qkv_proj", ["l.qkv_proj"]) is None
    assert fused_name("m.l.gate_up_proj", ["m.l.gate_proj", "m.l.up_proj"]) == "m.l.gate_up_proj"
