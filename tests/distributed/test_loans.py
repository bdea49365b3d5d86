# SPDX-License-Identifier: Apache-2.0
"""Check that tensor parallel ranks lend to an engine's workers what they hold of the Hugging Face weights."""

import pytest
from safetensors.torch import load_file

from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks


def lent(folder: str, layout: dict[str, int]) -> list[str]:
    """Compare every part that this rank holds with the file's; return the names of what it lends in one piece."""
    import torch

    from megarl.build import build_model
    from megarl.checkpoint_engine import loan

    section = {"path": folder, "dtype": "float32"}
    lora = {"r": 4, "target_modules": "all-linear"}
    model = build_model(section, lora=lora, train={"device": "cpu"}, parallel=layout)
    whole, held = load_file(f"{folder}/model.safetensors"), list(model.held_base())
    for name, shape, part, view in held:
        wanted = whole[name][part]
        assert shape == tuple(whole[name].shape), name
        assert torch.equal(
            view.reshape(-1, wanted.shape[-1])[: wanted[..., 0].numel()], wanted.reshape(-1, wanted.shape[-1])
        )
    assert {one.name for one in held} == set(whole)
    loan.exported = lambda piece: [piece]
    found = loan.lend(held, "cpu")
    for one in found.tensors:
        [piece] = found.handles[one.memory]
        count = torch.Size(one.size).numel()
        values = piece[one.offset : one.offset + 4 * count].view(torch.float32).view(one.size)
        (row, column), (rows, columns) = one.start, one.size
        matrix = whole[one.name].reshape(-1, one.shape[-1])
        assert torch.equal(values, matrix[row : row + rows, column : column + columns]), one.name
    return [one.name.removeprefix("model.").removesuffix(".weight") for one in found.tensors]


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3", {"tensor": 2}), ("qwen3_moe", {"tensor": 2, "expert_tensor": 2})]
)
def test_ranks_lend_the_parts_that_they_hold(family: str, layout: dict[str, int], tmp_path) -> None:
    make_model(tmp_path, family, tied=False)
    first, second = run_ranks(lent, 2, str(tmp_path), layout)
    assert first == second
    mlp = "mlp.experts.0." if family == "qwen3_moe" else "mlp."
    wanted = [
        "embed_tokens",
        "lm_head",
        *(f"layers.0.self_attn.{one}_proj" for one in "qkvo"),  # a rank has one KV head
        *(f"layers.0.{mlp}{one}_proj" for one in ("gate", "up", "down")),
    ]
    assert set(wanted) <= set(first)
