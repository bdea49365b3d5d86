"""What is verified, and where its files lie."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import RunConfig
from megarl.model.families import names_of
from megarl.model.hf_folder import read_config
from megarl.types import Sample
from megarl.verify.compare import Rule
from megarl.verify.samples import COUNT, make_samples, weights_of

# Which of the samples are used, where some are not.
KEPT = "kept"


@dataclass(frozen=True)
class Case:
    """One model and one adapter, trained the same way at every layout.

    Attributes:
        name: a file name.
        config: ``model`` and ``train`` are used; layouts replace ``parallel``.
        adapter: the PEFT directory to start from.
        folder: for all that is computed.
    """

    name: str
    config: RunConfig
    adapter: Path
    folder: Path

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

    def samples(self) -> tuple[list[Sample], np.ndarray]:
        """The batch of every update and its loss weights."""
        drawn = make_samples(COUNT[self.dtype], self.vocab_size, seed=self.config.train.seed)
        samples = [drawn[index] for index in self._used()]
        return samples, weights_of(samples)

    def keep_samples(self, kept: list[int]) -> None:
        """Verify with these of ``samples()`` alone, from now on and in every process."""
        used = self._used()
        self.write(KEPT, [used[index] for index in kept])

    def _used(self) -> list[int]:
        return self.read(KEPT) if self.has(KEPT) else list(range(COUNT[self.dtype]))

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
