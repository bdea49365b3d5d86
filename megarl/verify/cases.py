# SPDX-License-Identifier: Apache-2.0
"""Define cases to verify (a model and an adapter), and the files in which processes share results."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import RunConfig
from megarl.families import add_family
from megarl.types import Sample
from megarl.verify.compare import Rule
from megarl.verify.inputs.model_facts import has_experts, shape_of
from megarl.verify.inputs.samples import (
    COUNT,
    LONG,
    QUICK_COUNT,
    UPDATE_SCALES,
    distinct_samples,
    verify_samples,
    weights_of,
)

# File with the indices of the samples in use, if some are not.
KEPT = "kept"
# File with the factor of the loss weights, chosen so that some updates are clipped.
SCALE = "scale"


@dataclass(frozen=True)
class Case:
    """One model and one adapter, trained in the same way at every layout.

    Attributes:
        name: name, usable as a file name.
        config: the run config, of which ``model`` and ``train`` are used. Layouts replace ``parallel``.
        adapter: PEFT directory of the initial adapter.
        folder: folder for all results.
        full: True for the number of samples of ``megarl verify --full``.
    """

    name: str
    config: RunConfig
    adapter: Path
    folder: Path
    full: bool = True

    @property
    def model(self) -> Path:
        """The model's Hugging Face folder. Adds ``model.family``: every process asks for the folder before it reads."""
        add_family(self.config.model.family)
        return Path(self.config.model.path).expanduser()

    @property
    def dtype(self) -> str:
        """The dtype under test."""
        return self.config.model.dtype

    @property
    def rule(self) -> Rule:
        """The rule by which errors are judged."""
        return Rule.of(self.dtype, routers=has_experts(self.model))

    @property
    def vocab_size(self) -> int:
        """Vocabulary size from config.json."""
        return shape_of(self.model)["vocab_size"]

    @property
    def temperature(self) -> float:
        """Temperature of the policy on both sides."""
        return self.config.sampler.temperature

    @property
    def long(self) -> int:
        """Length of the longest sequence in tokens: ``LONG``, or fewer if the model has fewer positions."""
        return min(LONG, shape_of(self.model).get("max_position_embeddings") or LONG)

    def samples(self) -> list[Sample]:
        """Return the batch of every update."""
        drawn = verify_samples(self._count, self.vocab_size, seed=self.config.train.seed, long=self.long)
        return [drawn[index] for index in self._used()]

    def traced_samples(self) -> list[Sample]:
        """Return sequences in which a token's id tells its position."""
        return distinct_samples(self.vocab_size, seed=self.config.train.seed, long=self.long)

    def weights(self, update: int) -> np.ndarray:
        """Return the samples' loss weights in an update (counted from 0), float64 ``[S]``."""
        scale = self.read(SCALE) if self.has(SCALE) else 1.0
        return weights_of(self.samples()) * scale * UPDATE_SCALES[update % len(UPDATE_SCALES)]

    def all_weights(self) -> list[np.ndarray]:
        """Return ``weights`` of every update."""
        return [self.weights(update) for update in range(self.config.train.steps)]

    def keep_scale(self, norm: float) -> None:
        """Scale the loss so that its gradient norm is ``train.max_grad_norm``, from now on and in every process.

        Args:
            norm: global gradient norm of ``samples()`` with the weights of ``samples.weights_of``.
        """
        self.write(SCALE, (self.config.train.max_grad_norm or norm) / norm)

    def keep_samples(self, kept: list[int]) -> None:
        """Use only these of ``samples()``, from now on and in every process."""
        used = self._used()
        self.write(KEPT, [used[index] for index in kept])

    def _used(self) -> list[int]:
        return self.read(KEPT) if self.has(KEPT) else list(range(self._count))

    @property
    def _count(self) -> int:
        return (COUNT if self.full else QUICK_COUNT)[self.dtype]

    def write(self, name: str, value: Any) -> None:
        """Store a result for other processes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{name}.pkl").write_bytes(pickle.dumps(value))

    def read(self, name: str) -> Any:
        """Return a result stored by ``write``."""
        return pickle.loads((self.folder / f"{name}.pkl").read_bytes())

    def has(self, name: str) -> bool:
        """Return True if ``write`` stored the result."""
        return (self.folder / f"{name}.pkl").is_file()


@dataclass(frozen=True)
class Place:
    """A case at one layout.

    Attributes:
        case: the case.
        layout: name of the layout.
        config: the case's config at this layout.
    """

    case: Case
    layout: str
    config: RunConfig

    @property
    def folder(self) -> Path:
        """Folder for what is saved at this layout."""
        return self.case.folder / self.layout

    @property
    def resumed(self) -> str:
        """Name under which the case stores the adapter after this place's checkpoint was resumed."""
        return f"{self.layout}/resumed"

    @property
    def key(self) -> str:
        """``layout/case``, unique."""
        return f"{self.layout}/{self.case.name}"
