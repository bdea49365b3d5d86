# SPDX-License-Identifier: Apache-2.0
"""Test group advantages: the published formulas, and their invariants."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import nanstd

from megarl.config import LossConfig
from megarl.errors import LossInputError
from megarl.loss import group_advantages
from megarl.loss.advantages import build_advantages

REWARDS = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16).map(np.array)


def test_std_equals_trl() -> None:
    rewards = np.array([0.0, 1.0, 0.1, 0.6, 0.6, 0.0, 1.0, 0.0])
    group = torch.from_numpy(rewards)
    expected = (group - group.nanmean()) / (nanstd(group, dim=0) + 1e-4)
    np.testing.assert_allclose(group_advantages(rewards, "std"), expected.numpy(), rtol=1e-6)


def test_none_only_centres() -> None:
    np.testing.assert_allclose(group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), "none"), [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("reward", [0.1, -7.3, 0.0, 0.6, 1e300, 1e-300, 1 / 3])
@pytest.mark.parametrize("size", [1, 3, 6, 8, 10, 12])
def test_equal_rewards_give_exactly_zero(size: int, reward: float, scale: str) -> None:
    advantages = group_advantages(np.full(size, reward), scale)  # type: ignore[arg-type]
    assert advantages.dtype == np.float32
    assert (advantages == 0.0).all()


@given(REWARDS, st.sampled_from(["std", "none"]))
def test_advantages_are_finite_centred_and_keep_the_order(rewards: np.ndarray, scale: str) -> None:
    advantages = group_advantages(rewards, scale)  # type: ignore[arg-type]
    assert np.isfinite(advantages).all()
    assert abs(advantages.sum(dtype=np.float64)) <= 1e-5 * len(rewards) * max(1.0, np.abs(advantages).max())
    assert (np.diff(advantages[np.argsort(rewards, kind="stable")]) >= 0).all()


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e16, 9e37])
def test_a_signal_in_the_last_bit_is_kept(size: float, scale: str) -> None:
    advantages = group_advantages(np.array([size] * 11 + [np.nextafter(size, 2 * size)]), scale)  # type: ignore[arg-type]
    assert np.isfinite(advantages).all()
    assert advantages[-1] > 0 > advantages[0]


@pytest.mark.parametrize(
    ("rewards", "scale", "message"),
    [
        (np.array([0.0, np.nan]), "std", "not finite"),
        (np.array([0.0, np.inf]), "none", "not finite"),
        (np.array([1e308, -1e308]), "std", r"beyond \+-1e\+38: \[1e\+308, -1e\+308\]"),
        (np.zeros((2, 2)), "std", r"rewards_G has shape \(2, 2\)"),
        (np.zeros(0), "std", r"rewards_G has shape \(0,\)"),
        (np.zeros(2), "batch", "'batch'; it must be 'std' or 'none'"),
    ],
)
def test_wrong_rewards_are_refused_by_name(rewards: np.ndarray, scale: str, message: str) -> None:
    with pytest.raises(LossInputError, match=message):
        group_advantages(rewards, scale)  # type: ignore[arg-type]


def test_leave_one_out_is_against_the_mean_of_the_others():
    rewards = np.array([1.0, 0.0, 3.0, 0.5])
    expected = [reward - np.delete(rewards, i).mean() for i, reward in enumerate(rewards)]
    np.testing.assert_allclose(build_advantages(LossConfig(advantage="rloo"))(rewards), expected, rtol=1e-6)
    np.testing.assert_array_equal(build_advantages(LossConfig(advantage="none"))(rewards), rewards)
    with pytest.raises(LossInputError, match="samples_per_prompt of at least 2"):
        build_advantages(LossConfig(advantage="rloo"))(rewards[:1])


def test_a_user_gives_advantages_by_token_and_a_wrong_number_is_an_error(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import numpy as np\ndef late(r, config):\n    return [np.linspace(0, x, 3) for x in r]\n")
    file.write_text(file.read_text() + "def short(r, config):\n    return r[1:]\n")
    found = build_advantages(LossConfig(advantage=f"{file}:late"))(np.array([1.0, 2.0]))
    np.testing.assert_allclose(found, [[0, 0.5, 1], [0, 1, 2]])
    with pytest.raises(LossInputError, match="returned 1 advantages for 2 rewards"):
        build_advantages(LossConfig(advantage=f"{file}:short"))(np.array([1.0, 2.0]))
