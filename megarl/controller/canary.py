# SPDX-License-Identifier: Apache-2.0
"""Compare the logprobs of trainer and engines for a fixed token sequence, after each sync.

A sync verifies that the engines hold the bytes that were sent. The canary verifies what those bytes compute: that the
engines use the adapter, and that both sides mean the same by it.
"""

from collections.abc import Mapping

import numpy as np

from megarl.errors import WeightSyncError

# Length of the sequence, in tokens.
TOKENS = 64
# Largest mean |sampler - trainer| logprob difference, by dtype of the model. In bfloat16 the two round differently in
# every layer; published runs report means of 0.005 to 0.02.
AGREEMENT = {"float32": 1e-3, "bfloat16": 0.1}
# The same as a share of the mean |logprob|, if that is more: a bfloat16 logit has 8 bits, so the logprobs of unlikely
# tokens, which prompts are full of, carry errors that grow with them. A quickstart reached 0.102 at a sampled-token
# mismatch of 0.02.
RELATIVE = {"float32": 0.0, "bfloat16": 0.05}
# A mean change of the trainer's logprobs above this must change the engines' too.
MOVED = {"float32": 1e-5, "bfloat16": 1e-2}


class Canary:
    """Checks the engines' logprobs of one sequence, version after version.

    Attributes:
        tokens: the sequence, int64 ``[T]``: the first tokens of a prompt; a prompt of one token is doubled.
    """

    def __init__(self, dtype: str, prompt: np.ndarray) -> None:
        """
        Args:
            dtype: ``model.dtype``.
            prompt: a prompt's token ids, int64 ``[P]``.
        """
        self.tokens = np.resize(prompt, 2) if len(prompt) < 2 else prompt[:TOKENS]
        self._agreement, self._relative, self._moved = AGREEMENT[dtype], RELATIVE[dtype], MOVED[dtype]
        # Engine's name -> the trainer's and its logprobs at the last version that moved the trainer's enough. Small
        # moves add up.
        self._before: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def check(self, version: int, trainer: np.ndarray, engines: Mapping[str, np.ndarray]) -> float:
        """Compare the logprobs, and their change since an earlier version.

        Args:
            version: the policy version, for messages.
            trainer: the trainer's logprobs of all tokens but the first, float32 ``[T - 1]``, at temperature 1.
            engines: engine's name -> its logprobs of them.

        Returns:
            The largest mean |sampler - trainer| difference of an engine.

        Raises:
            WeightSyncError: an engine disagrees with the trainer, or its logprobs did not change although the trainer's
                did.
        """
        worst, allowed = 0.0, max(self._agreement, self._relative * float(np.abs(trainer).mean()))
        for name, scored in engines.items():
            difference = float(np.abs(scored - trainer).mean()) if scored.shape == trainer.shape else float("nan")
            if not difference <= allowed:
                raise WeightSyncError(
                    f"canary: {name} and the trainer differ by {difference:.3g} in the mean logprob of a fixed "
                    f"sequence under version {version}; allowed is {allowed:.3g}: they do not compute "
                    "the same policy (checkpoint_engine.canary: false switches this check off)"
                )
            worst = max(worst, difference)
            self._check_moved(version, trainer, name, scored)
        return worst

    def _check_moved(self, version: int, trainer: np.ndarray, name: str, scored: np.ndarray) -> None:
        trainer_before, before = self._before.setdefault(name, (trainer, scored))
        moved = float(np.abs(trainer - trainer_before).mean())
        if moved <= self._moved:
            return
        if np.array_equal(scored, before):
            raise WeightSyncError(
                f"canary: up to version {version} the trainer's logprobs of a fixed sequence changed by {moved:.3g} in "
                f"the mean, and those of {name} not at all: it does not use the new weights"
            )
        self._before[name] = trainer, scored
