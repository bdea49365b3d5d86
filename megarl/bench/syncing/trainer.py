# SPDX-License-Identifier: Apache-2.0
"""Be the trainer of `megarl bench sync`: one rank, or several data parallel ones that do what rank 0 does."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.bench.adapters import change_adapter, lora_section
from megarl.bench.random_weights import base_filler
from megarl.bench.syncing.settings import SyncBenchSettings
from megarl.build import build_model
from megarl.checkpoint_engine.board import Board
from megarl.checkpoint_engine.phases import SyncReport
from megarl.checkpoint_engine.weight_sync import WeightSync
from megarl.checkpoint_engine.wire import Kind
from megarl.config import TrainConfig
from megarl.parallel.groups import destroy_groups
from megarl.sampler.process import SamplerProcess
from megarl.types import Sample

# The longest that rank 0 leaves the others without a word, and the time in which they follow one, seconds.
SILENCE, FOLLOWING = 1800.0, 2e-3


class SyncTrainer:
    """A rank of the trainer. Rank 0's methods are called; the other ranks ``follow``.

    Args:
        settings: of the bench.
        folder: the model's.
    """

    def __init__(self, settings: SyncBenchSettings, folder: Path) -> None:
        train = TrainConfig(device=settings.device, seed=settings.seed, micro_batch_tokens=512)
        section = {"path": str(folder), "dtype": settings.dtype}
        fill = base_filler(settings.model, settings.seed)
        parallel = {"data": settings.data}
        lora = lora_section(settings.r)
        self.model = build_model(section, lora=lora, parallel=parallel, train=train, fill_base=fill)
        change_adapter(self.model, settings.seed)
        self._settings, self._board = settings, Board(SILENCE)
        self._weights: WeightSync | None = None

    @property
    def version(self) -> int:
        """The present version."""
        return self.model.version

    @property
    def transport(self) -> str:
        """The name of the transport, once a sync has chosen it."""
        assert self._weights is not None
        return self._weights.transport

    def follow(self) -> None:
        """Do what rank 0 does, to its end."""
        while True:
            method, arguments = self._board.next_call(SILENCE)
            assert method is not None
            getattr(self, method)(*arguments)
            if method == "end":
                return

    def open(self, content: str, engines: Sequence[SamplerProcess] = ()) -> None:
        """Prepare for syncs of a content to engines, which rank 0 has."""
        self._tell("open", content)
        settings = self._settings
        section = {"transport": settings.transport, "content": content, "bucket_mib": settings.bucket_mib}
        self._weights = WeightSync(self.model, engines, section)

    def change(self, seed: int | None = None) -> None:
        """Go on to the next version, with other values of the adapter if there is a seed."""
        self._tell("change", seed)
        if seed is not None:
            change_adapter(self.model, seed)
        self.model.version += 1

    def sync(self, kind: Kind | None = None) -> tuple[float, SyncReport]:
        """Return the seconds from the end of the device's work until the new version serves, and the report."""
        assert self._weights is not None
        if self._tell("sync", kind):
            time.sleep(FOLLOWING)  # in a loop of their own the other ranks would be there
        if self.model.groups.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        done = self._weights.sync(kind)
        return time.perf_counter() - began, done

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logprobs of a sequence's tokens but the first."""
        self._tell("logprobs", tokens)
        sample = Sample(tokens, np.arange(len(tokens)) > 0)
        return self.model.forward(self.model.pack([sample]), temperature=1.0)[0]

    def close(self) -> None:
        """Disconnect from the engines."""
        self._tell("close")
        assert self._weights is not None
        self._weights.close()

    def end(self) -> None:
        """Leave the group."""
        self._tell("end")
        destroy_groups()

    def _tell(self, method: str, *arguments: Any) -> bool:
        """Let the other ranks call a method, if this is rank 0 and there are others; return whether they do."""
        others = self.model.groups.rank == 0 and not self._board.alone
        if others:
            self._board.tell(method, *arguments)
        return others
