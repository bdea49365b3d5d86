# SPDX-License-Identifier: Apache-2.0
"""Send PEFT directories to engines, through the same checks as a trainer's adapter."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megarl.checkpoint_engine.mixin import CheckpointEngineMixin
from megarl.checkpoint_engine.wire import Kind
from megarl.config import CheckpointEngineConfig
from megarl.errors import AdapterError
from megarl.files import read_json
from megarl.futures import done, in_thread

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class FolderSource(CheckpointEngineMixin):
    """A ``checkpoint_engine.participants.Source`` whose weights are those of the directory that was read last."""

    rank = 0

    def __init__(self) -> None:
        self._version = -1
        self._tensors: dict[str, torch.Tensor] = {}
        self._peft: dict[str, Any] = {}

    def read(self, folder: Path, version: int) -> None:
        """Read a PEFT directory, which is to be sent as a version.

        Raises:
            AdapterError: a file is missing or damaged.
        """
        self._peft = read_json(folder / CONFIG, "adapter", AdapterError)
        try:
            self._tensors = load_file(folder / WEIGHTS)
        except FileNotFoundError as error:
            raise AdapterError(f"{folder / WEIGHTS} does not exist; save the adapter as safetensors") from error
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{folder / WEIGHTS} cannot be read ({error}); it is truncated or damaged") from error
        # Another adapter may have the same config, and other tensors.
        self._version, self._plans = version, None

    def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors by PEFT's names."""
        assert adapter_only
        yield from sorted(self._tensors.items())

    def export_adapter_config(self) -> dict[str, Any]:
        """Return the directory's ``adapter_config.json``."""
        return self._peft

    def policy_version(self) -> int:
        """Return the version given to ``read``."""
        return self._version

    def places(self) -> Future[Any]:
        """See ``checkpoint_engine.participants.Source``."""
        return done(lambda: [self.place()])

    def prepare(self, config: CheckpointEngineConfig, receivers: int, senders: Sequence[int]) -> Future[Any]:
        """See ``checkpoint_engine.participants.Source``."""
        return in_thread(lambda: self.prepare_sync(config, receivers, senders))

    def send(self, version: int, kind: Kind) -> Future[Any]:
        """See ``checkpoint_engine.participants.Source``."""
        return in_thread(lambda: self.send_weights(version, kind))

    def finish(self) -> Future[Any]:
        """See ``checkpoint_engine.participants.Source``."""
        return in_thread(self.finish_sync)
