# SPDX-License-Identifier: Apache-2.0
"""What is verified, and where its files lie."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import RunConfig
from megarl.model.weights.full_config import names_of
from megarl.model.weights.hf_folder import read_config
from megarl.types import Sample
from megarl.verify.compare import Rule
from megarl.verify.inputs.samples import (
    COUNT,
    LONG,
    QUICK_COUNT,
    UPDATE_SCALES,
    distinct_samples,
    verify_samples,
    weights_of,
)

# Which of the samples are used, where some are not.
KEPT = "kept"
# What the loss weights are multiplied by, so that some updates are clipped.
SCALE = "scale"


@dataclass(frozen=True)
class Case:
    """One model and one adapter, trained the same way at every layout.

    Attributes:
        name: a file name.
        config: ``model`` and ``train`` are used; layouts replace ``parallel``.
        adapter: the PEFT directory to start from.
        folder: for all that is computed.
        full: take as many samples as ``megarl verify --full`` does.
    """

    name: str
    config: RunConfig
    adapter: Path
    folder: Path
    full: bool = True

    @property
    def model(self) -> Path:
        """The Hugging Face folder."""
        return Path(self.config.model.path).expanduser()

    @property
    def dtype(self) -> str:
        """The dtype under test."""
        return self.config.model.dtype

    @property
    def rule(self) -> Rule:
        """What passes."""
        return Rule.of(self.dtype, routers=bool(names_of(read_config(self.model)).num_experts))

    @property
    def vocab_size(self) -> int:
        """From config.json."""
        return read_config(self.model)["vocab_size"]

    @property
    def temperature(self) -> float:
        """Of the policy on both sides."""
        return self.config.sampler.temperature

    @property
    def long(self) -> int:
        """Tokens of the longest sequence: ``LONG``, or fewer where the model has no more positions."""
        return min(LONG, read_config(self.model).get("max_position_embeddings") or LONG)

    def samples(self) -> list[Sample]:
        """The batch of every update."""
        drawn = verify_samples(self._count, self.vocab_size, seed=self.config.train.seed, long=self.long)
        return [drawn[index] for index in self._used()]

    def traced_samples(self) -> list[Sample]:
        """Sequences in which a token's id says where it stands."""
        return distinct_samples(self.vocab_size, seed=self.config.train.seed, long=self.long)

    def weights(self, update: int) -> np.ndarray:
        """``[S]`` float64 loss weights of the samples in an update, counted from 0."""
        scale = self.read(SCALE) if self.has(SCALE) else 1.0
        return weights_of(self.samples()) * scale * UPDATE_SCALES[update % len(UPDATE_SCALES)]

    def all_weights(self) -> list[np.ndarray]:
        """``weights`` of every update."""
        return [self.weights(update) for update in range(self.config.train.steps)]

    def keep_scale(self, norm: float) -> None:
        """Scale the loss so that its gradient is as large as ``train.max_grad_norm``, from now on and in every process.

        Args:
            norm: global gradient norm of ``samples()`` with the weights of ``samples.weights_of``.
        """
        self.write(SCALE, (self.config.train.max_grad_norm or norm) / norm)

    def keep_samples(self, kept: list[int]) -> None:
        """Verify with these of ``samples()`` alone, from now on and in every process."""
        used = self._used()
        self.write(KEPT, [used[index] for index in kept])

    def _used(self) -> list[int]:
        return self.read(KEPT) if self.has(KEPT) else list(range(self._count))

    @property
    def _count(self) -> int:
        return (COUNT if self.full else QUICK_COUNT)[self.dtype]

    def write(self, name: str, value: Any) -> None:
        """Keep a result for the other processes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{name}.pkl").write_bytes(pickle.dumps(value))

    def read(self, name: str) -> Any:
        """What ``write`` kept."""
        return pickle.loads((self.folder / f"{name}.pkl").read_bytes())

    def has(self, name: str) -> bool:
        """Whether ``write`` kept it."""
        return (self.folder / f"{name}.pkl").is_file()


@dataclass(frozen=True)
class Place:
    """A case at one layout.

    Attributes:
        case: the model.
        layout: the layout's name.
        config: the case's, at this layout.
    """

    case: Case
    layout: str
    config: RunConfig

    @property
    def folder(self) -> Path:
        """For what is saved at this layout."""
        return self.case.folder / self.layout

    @property
    def resumed(self) -> str:
        """Under which name the case keeps the adapter that this place's checkpoint went on to."""
        return f"{self.layout}/resumed"

    @property
    def key(self) -> str:
        """``layout/case``."""
        return f"{self.layout}/{self.case.name}"
