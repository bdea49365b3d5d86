# SPDX-License-Identifier: Apache-2.0
"""Compare the logprobs of `numerics: bitwise` on both sides, and swap each operation for a fast one on one side.

The trainer is megarl's model. The sampler is a model of the functions that replace vLLM's (`tests.helpers`). The
operations are those that the code lists. `tests.gpu.bitwise_model` compares with vLLM itself.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.bitwise_configs import configs
from tests.helpers.bitwise_swaps import FAST, LARGE, OPERATIONS, Pair, changes, unlike

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
LENGTHS = (300, 17, 141, 64, 5, 90)


@pytest.fixture(scope="module", params=configs(LARGE))
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    yield Pair(configs(LARGE)[request.param], LENGTHS, "cuda", "bfloat16", tmp_path_factory.mktemp(request.param))


def test_no_logprob_differs(pair: Pair) -> None:
    assert unlike(pair.sampler(), pair.trainer()) == 0


@pytest.mark.parametrize("side", OPERATIONS)
def test_every_operation_has_a_fast_one(side: str) -> None:
    assert OPERATIONS[side]().keys() == FAST[side].keys()


@pytest.mark.parametrize(("side", "name"), [(side, name) for side in OPERATIONS for name in OPERATIONS[side]()])
def test_one_fast_operation_is_noticed(pair: Pair, side: str, name: str) -> None:
    assert changes(pair, side, name) > 0
    assert unlike(pair.sampler(), pair.trainer()) == 0
