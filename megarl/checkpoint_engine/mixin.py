# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of a sync, for any class that can export its weights."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from megarl.checkpoint_engine.base import Link, Sender, open_sender
from megarl.checkpoint_engine.stream import send_tensors
from megarl.checkpoint_engine.wire import Kind, check_sync
from megarl.config import CheckpointEngineConfig
from megarl.errors import WeightSyncError


class CheckpointEngineMixin:
    """Adds ``prepare_sync``, ``send_weights`` and ``finish_sync`` to a trainer rank.

    Every rank calls all three in this order with the same arguments. All ranks run the export (a collective). Rank 0
    sends, and its return values go to the manager.
    """

    rank: int
    _sync: "tuple[int, Kind, CheckpointEngineConfig] | None" = None
    _sender: "Sender | None" = None

    def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors under PEFT's (adapter) or Hugging Face's (base) names, on every rank. Collective."""
        raise NotImplementedError(f"{type(self).__name__} must define export_weights")

    def export_merged(self, changed_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors, base plus adapter, under Hugging Face's names, on every rank. Collective.

        Args:
            changed_only: True leaves out the blocks that the adapter does not change.
        """
        raise NotImplementedError(f"{type(self).__name__} must define export_merged")

    def export_adapter_config(self) -> dict[str, Any]:
        """Return the adapter's ``adapter_config.json``, as ``peft.LoraConfig`` reads it."""
        raise NotImplementedError(f"{type(self).__name__} must define export_adapter_config")

    def policy_version(self) -> int:
        """Return the version of this rank's weights, by its own count of optimizer steps."""
        raise NotImplementedError(f"{type(self).__name__} must define policy_version")

    def prepare_sync(self, version: int, kind: Kind, config: CheckpointEngineConfig, receivers: int) -> bytes | None:
        """Open the transport on rank 0.

        Args:
            version: policy version of the weights.
            kind: ``"adapter"``, ``"base"`` or ``"merged"``.
            config: transport, bucket size, time limit.
            receivers: number of vLLM workers over all engines.

        Returns:
            On rank 0 the endpoint as JSON (the transport's, plus ``version`` and ``kind``), elsewhere None.

        Raises:
            WeightSyncError: the weights have another version, or the transport cannot be opened.
        """
        self.finish_sync()
        check_sync(version, kind)
        self._check_version(version)
        if self.rank == 0:
            self._sender = open_sender(config.transport, Link(receivers, config.timeout_seconds))
        self._sync = (version, kind, config)
        if self._sender is None:
            return None
        endpoint = {"transport": config.transport, "version": version, "kind": kind}
        return json.dumps(endpoint | self._sender.endpoint()).encode()

    def send_weights(self) -> bytes | None:
        """Export the weights, and send them on rank 0.

        Returns:
            On rank 0 the manifest as JSON, elsewhere None.

        Raises:
            WeightSyncError: the weights have another version, or the transport failed. The export is still run to its
                end then, so that no other rank waits in a collective.
            Exception: the export raised it, on any rank.
        """
        if self._sync is None:
            raise WeightSyncError("send_weights was called without prepare_sync")
        (version, kind, config), self._sync = self._sync, None
        self._check_version(version)
        if kind == "merged":
            weights = self.export_merged(changed_only=True)
        else:
            weights = self.export_weights(adapter_only=kind == "adapter")
        if self._sender is None:
            _run_to_end(weights)
            return None
        try:
            manifest = send_tensors(
                self._sender,
                weights,
                version=version,
                kind=kind,
                adapter_config=self.export_adapter_config() if kind == "adapter" else None,
                bucket_bytes=config.bucket_mib * 2**20,
            )
            return manifest.to_bytes()
        except BaseException:
            # Keep the first error, which has the cause; the export may fail as well.
            with contextlib.suppress(Exception):
                _run_to_end(weights)
            raise

    def finish_sync(self) -> None:
        """Close the transport. Safe at any time. The manager calls it after success and after failure."""
        sender, self._sender, self._sync = self._sender, None, None
        if sender is not None:
            sender.close()

    def _check_version(self, version: int) -> None:
        """Raise ``WeightSyncError`` unless the weights are those of ``version``; the caller's count may be wrong."""
        if (actual := self.policy_version()) != version:
            raise WeightSyncError(
                f"trainer rank {self.rank} was asked to send policy version {version}, but its weights are those of "
                f"version {actual} (their number of optimizer steps)"
            )


def _run_to_end(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Consume an export whose tensors this rank does not need, as its collectives require."""
    for _ in weights:
        pass
