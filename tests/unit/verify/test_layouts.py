# SPDX-License-Identifier: Apache-2.0
"""Test the layouts of the matrix, and the choice of the layout at which a checkpoint is resumed."""

import json

import pytest

from megarl.config import ParallelConfig
from megarl.config.cross_sections import check_layout
from megarl.errors import ConfigError, UnsupportedError
from megarl.verify.inputs.layouts import (
    all_layouts,
    allowed_layouts,
    chosen_layouts,
    describe_refused,
    label,
    other_layout,
)
from megarl.verify.inputs.settings import verify_config
from tests.unit.verify.test_settings import SHAPE

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "model_type": "qwen3_moe"}


def config_of(folder, shape, overrides=()):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return verify_config(folder, overrides)


def test_a_label_names_every_axis():
    parallel = ParallelConfig(
        tensor=2, pipeline=2, virtual_pipeline=2, context=2, expert=2, expert_tensor=2, data=4, sequence=True
    )
    assert label(parallel) == "TP2+SPxPP2xVPP2xCP2xEP2xETP2xDP4"
    assert label(ParallelConfig(tensor=2, sequence=False)) == "TP2"
    assert label(ParallelConfig()) == "TP1"


def test_every_product_that_fits_is_met_once():
    layouts = list(all_layouts(4))
    labels = [label(layout) for layout in layouts]
    assert len(set(labels)) == len(labels)
    assert all(layout.world_size <= 4 for layout in layouts)
    # Sizes of the dense axes that fit in 4 ranks, times VPP, EP and ETP, times SP on and off if TP is on.
    dense = {(t, p, c, d) for t in (1, 2) for p in (1, 2) for c in (1, 2) for d in (1, 2, 4) if t * p * c * d <= 4}
    assert len(labels) == 8 * sum(t for t, *_ in dense)


def test_what_fits_is_allowed_and_what_makes_no_sense_is_not_mentioned(tmp_path):
    allowed, refused = allowed_layouts(config_of(tmp_path / "dense", SHAPE), 4)
    assert {"TP1", "TP2", "TP2+SP", "PP2xVPP2xDP2", "TP2+SPxPP2", "DP4"} <= allowed.keys()
    assert not {"EP2", "TP2xETP2", "VPP2"} & allowed.keys()
    assert refused == {}
    worlds = [layout.parallel.world_size for layout in allowed.values()]
    assert worlds == sorted(worlds)


def test_what_is_not_proven_is_refused_with_its_reason(tmp_path):
    allowed, refused = allowed_layouts(config_of(tmp_path / "experts", SHAPE | EXPERTS), 4)
    assert {"EP2xDP2", "TP2+SPxETP2", "TP2+SPxPP2xEP2", "TP2+SPxEP2xETP2xDP2"} <= allowed.keys()
    [(reason, labels)] = refused.items()
    assert "sequence is false" in reason
    assert "TP2" in labels and not allowed.keys() & set(labels)
    [line] = describe_refused(refused)
    assert line.startswith("TP2, ") and line.endswith(f": {reason}")


def test_layouts_of_transformers_are_refused_with_what_only_megatron_has(tmp_path):
    names = ["transformers", "transformers DP2", "transformers DP2+shards"]
    plain = config_of(tmp_path / "dense", SHAPE)
    ours, _ = allowed_layouts(plain, 2)
    allowed, refused = allowed_layouts(plain, 2, transformers=True)
    assert list(allowed) == [*ours, *names] and refused == {}
    compiled = plain.model_copy(update={"train": plain.train.model_copy(update={"compile": True})})
    allowed, refused = allowed_layouts(compiled, 2, transformers=True)
    [(reason, labels)] = refused.items()
    assert list(allowed) == list(ours) and labels == names
    assert "train.compile = True" in reason


def test_layouts_are_chosen_by_name(tmp_path):
    allowed, refused = allowed_layouts(config_of(tmp_path / "experts", SHAPE | EXPERTS), 4)
    chosen, left = chosen_layouts(allowed, refused, ["PP2*", "TP1"])
    assert {"TP1", "PP2", "PP2xVPP2", "PP2xEP2xDP2"} <= chosen.keys() < allowed.keys()
    assert all(name == "TP1" or name.startswith("PP2") for name in chosen) and left == {}
    assert chosen_layouts(allowed, refused, ["TP2*"])[1] == refused
    assert chosen_layouts(allowed, refused, []) == (allowed, refused)
    with pytest.raises(ConfigError, match=r"'TP3', and no allowed layout is named so; they are TP1, .*TP2\+SP"):
        chosen_layouts(allowed, refused, ["TP1", "TP3"])


def test_checks_alone_decide(tmp_path):
    allowed, _ = allowed_layouts(config_of(tmp_path / "experts", SHAPE | EXPERTS), 4)
    for parallel in all_layouts(4):
        try:
            check_layout(parallel)
        except (ConfigError, UnsupportedError):
            assert label(parallel) not in allowed


@pytest.mark.parametrize(
    ("overrides", "ranks", "changed"),
    [
        ([], 2, {"pipeline", "virtual_pipeline"}),
        (["parallel.tensor=2"], 2, {"tensor", "pipeline", "virtual_pipeline"}),
        (["parallel.pipeline=2"], 2, {"pipeline", "tensor"}),
    ],
)
def test_a_checkpoint_goes_to_the_layout_that_differs_most(tmp_path, overrides, ranks, changed):
    config = config_of(tmp_path / "dense", SHAPE, overrides)
    other = other_layout(config, ranks)
    assert other is not None
    here, there = config.parallel.model_dump(), other.parallel.model_dump()
    assert {axis for axis in here if axis != "sequence" and here[axis] != there[axis]} >= changed
    assert other.parallel.world_size <= ranks


def test_with_one_rank_there_is_no_other_layout(tmp_path):
    assert other_layout(config_of(tmp_path / "dense", SHAPE), 1) is None
