# SPDX-License-Identifier: Apache-2.0
"""Layers are spread over pipeline stages so that none has much more to do than the others."""

from itertools import combinations

import pytest

from megarl.bench.shapes import SHAPES
from megarl.config import ParallelConfig
from megarl.model.layers.stages import balanced, output_layer, stage_settings
from megarl.model.weights.full_config import full_config


def spread(layers: int, stages: int) -> list[list[int]]:
    """Return every way to give each stage a layer or more."""
    cuts = combinations(range(1, layers), stages - 1)
    return [[b - a for a, b in zip((0, *cut), (*cut, layers), strict=True)] for cut in cuts]


@pytest.mark.parametrize("last", [0.0, 0.4, 1.0, 2.7, 30.0])
@pytest.mark.parametrize(("layers", "stages"), [(4, 1), (4, 4), (9, 2), (11, 4), (13, 3)])
def test_no_other_way_has_a_shorter_longest_stage(layers: int, stages: int, last: float) -> None:
    counts = balanced(layers, stages, last)
    assert sum(counts) == layers and min(counts) > 0

    def longest(counts: list[int]) -> float:
        return max([*counts[:-1], counts[-1] + last])

    assert longest(counts) == min(map(longest, spread(layers, stages)))


def test_a_rest_goes_to_inner_stages_first() -> None:
    assert balanced(10, 4, 0.0) == [2, 3, 3, 2] and balanced(11, 4, 0.0) == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("share", "counts"), [(1.0, [10, 10, 10, 6]), (None, [9, 10, 9, 8]), (0.5, [9, 10, 9, 8]), (0.2, [9, 9, 9, 9])]
)
def test_the_output_layer_of_qwen3_8b_takes_as_long_as_three_layers(share: float | None, counts: list[int]) -> None:
    """If all tokens have logits; the last stage has the fewer layers, the more have."""
    hf = full_config(SHAPES["qwen3-8b"].config())
    assert output_layer(hf) == pytest.approx(3.22, abs=0.01)
    settings = stage_settings(hf, ParallelConfig(pipeline=4, response_share=share))
    if len(set(counts)) == 1:
        assert settings == {}
        return
    (rows,) = settings.values()
    assert [row.count("decoder") for row in rows] == counts
    assert (rows[0][0], rows[-1][-1]) == ("embedding", "loss")


def test_equal_stages_need_no_setting() -> None:
    hf = full_config(SHAPES["qwen3-8b"].config())
    assert stage_settings(hf, ParallelConfig()) == {}
    # Two chunks a rank: 36 layers over 4 chunks.
    assert stage_settings(hf, ParallelConfig(pipeline=2, virtual_pipeline=2)) == {}
