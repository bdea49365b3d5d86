# SPDX-License-Identifier: Apache-2.0
"""Test what the canary accepts after a sync, and what it refuses."""

import numpy as np
import pytest

from megarl.controller.canary import TOKENS, Canary
from megarl.errors import WeightSyncError

OLD = np.linspace(-3, -1, 7, dtype=np.float32)
NEW = OLD + np.float32(0.01)
PROMPT = np.arange(8)


def test_agreeing_engines_pass_and_the_worst_difference_is_returned():
    canary = Canary("float32", PROMPT)
    assert canary.check(0, OLD, {"sampler 0": OLD, "sampler 1": OLD + np.float32(1e-4)}) == pytest.approx(1e-4, rel=0.1)
    canary.check(1, NEW, {"sampler 0": NEW, "sampler 1": NEW})


@pytest.mark.parametrize("scored", [OLD + np.float32(0.01), OLD[:-1], np.full(7, np.nan, np.float32)])
def test_an_engine_that_computes_something_else_is_named(scored):
    with pytest.raises(WeightSyncError, match=r"canary: sampler 1 and the trainer differ .* under version 3"):
        Canary("float32", PROMPT).check(3, OLD, {"sampler 0": OLD, "sampler 1": scored})


def test_unlikely_tokens_of_bfloat16_may_differ_by_a_share_of_their_logprobs():
    unlikely = OLD * 4  # a mean of -8
    canary = Canary("bfloat16", PROMPT)
    assert canary.check(0, unlikely, {"sampler 0": unlikely + np.float32(0.3)}) == pytest.approx(0.3, rel=1e-3)
    for trainer, difference in ((unlikely, 0.5), (OLD, 0.15)):
        with pytest.raises(WeightSyncError, match="do not compute the same policy"):
            Canary("bfloat16", PROMPT).check(0, trainer, {"sampler 0": trainer + np.float32(difference)})


def test_an_engine_that_goes_on_with_the_old_weights_is_named_though_it_is_close_enough():
    canary = Canary("bfloat16", PROMPT)
    canary.check(0, OLD, {"sampler 0": OLD, "sampler 1": OLD})
    moved = OLD + np.float32(0.05)
    with pytest.raises(WeightSyncError, match=r"up to version 1 the trainer.* and those of sampler 1 not at all"):
        canary.check(1, moved, {"sampler 0": moved, "sampler 1": OLD})


def test_small_moves_add_up():
    canary = Canary("bfloat16", PROMPT)
    with pytest.raises(WeightSyncError, match=r"up to version 11 .* of sampler 0 not at all"):
        for version in range(20):
            canary.check(version, OLD + np.float32(0.001 * version), {"sampler 0": OLD})


def test_weights_that_hardly_moved_prove_nothing():
    canary = Canary("float32", PROMPT)
    canary.check(0, OLD, {"sampler 0": OLD})
    canary.check(1, OLD + np.float32(1e-6), {"sampler 0": OLD})


def test_a_restarted_engine_has_no_version_before():
    canary = Canary("float32", PROMPT)
    canary.check(0, OLD, {"sampler 0": OLD})
    canary.check(1, NEW, {"sampler 0": NEW, "sampler 1": NEW})


def test_the_sequence_has_two_tokens_at_least():
    assert Canary("float32", np.array([5])).tokens.tolist() == [5, 5]
    assert len(Canary("float32", np.arange(1000)).tokens) == TOKENS
