# SPDX-License-Identifier: Apache-2.0
"""Spread a model's layers over pipeline stages."""

from collections.abc import Mapping
from typing import Any

from megarl.config import ParallelConfig
from megarl.model.layers.sequence_work import linear_shapes

# Of the tokens, those that have logits, where nothing says how many there are.
SHARE = 0.5


def stage_settings(hf: Mapping[str, Any], parallel: ParallelConfig) -> dict[str, Any]:
    """Return mcore's setting for stages of unequal size; none where every stage gets as many layers.

    Args:
        hf: the model's completed ``config.json``.
        parallel: the layout.
    """
    layers, stages = hf["num_hidden_layers"], parallel.pipeline * parallel.virtual_pipeline
    share = SHARE if parallel.response_share is None else parallel.response_share
    if parallel.virtual_pipeline > 1:
        share = 0.0  # each rank has several chunks, of which only the last holds the output layer
    counts = balanced(layers, stages, share * output_layer(hf))
    if len(set(counts)) == 1:
        return {}
    rows = [["decoder"] * count for count in counts]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    return {"pipeline_model_parallel_layout": rows}


def output_layer(hf: Mapping[str, Any]) -> float:
    """Return how many layers take as long as the output layer, by the products of a token that has logits."""
    return hf["vocab_size"] * hf["hidden_size"] / sum(outputs * inputs for outputs, inputs in linear_shapes(hf))


def balanced(layers: int, stages: int, last: float) -> list[int]:
    """Return each stage's number of layers, at least 1, so that the slowest stage has as little to do as possible.

    Of equal choices inner stages get a layer first, since the first stage also holds the embedding and the last one the
    logits.

    Args:
        layers: number of layers, at least ``stages``.
        stages: number of stages.
        last: what the last stage computes besides, in layers.
    """
    counts = [1] * stages
    order = [*range(1, stages - 1), 0, stages - 1][:stages]
    for _ in range(layers - stages):
        counts[min(order, key=lambda stage: counts[stage] + last * (stage == stages - 1))] += 1
    return counts
