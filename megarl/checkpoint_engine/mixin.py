# SPDX-License-Identifier: Apache-2.0
"""Add the trainer's side of a sync to any class that can export its weights."""

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megarl.checkpoint_engine.base import Link, open_sender
from megarl.checkpoint_engine.buckets.filling import Named
from megarl.checkpoint_engine.buckets.stream import Outbox, plan_of
from megarl.checkpoint_engine.choice import Sender, own_sender
from megarl.checkpoint_engine.loan import Held, lend
from megarl.checkpoint_engine.records import check_sync
from megarl.checkpoint_engine.wire import Kind, Plan
from megarl.config import CheckpointEngineConfig
from megarl.errors import WeightSyncError


class Sent(NamedTuple):
    """A sending rank's report of a transfer.

    Attributes:
        manifest: what was sent, as ``Receipt.to_bytes``, with the seconds of the trainer's stages.
        receipts: the receivers' receipts if they answered the sender itself, else none.
    """

    manifest: bytes
    receipts: list[bytes]


class CheckpointEngineMixin:
    """Adds ``prepare_sync``, ``send_weights`` and ``finish_sync`` to a trainer rank.

    Every rank calls all three in this order with the same arguments; a transport that stays connected is prepared once
    and may send many times. All ranks run the export (a collective). Rank 0 sends, or several ranks do (``senders``);
    what they return goes to the manager.
    """

    rank: int
    _config: "CheckpointEngineConfig | None" = None
    _outbox: "Outbox | None" = None
    _plans: "dict[str, Plan | None] | None" = None
    # What the plan of the active adapter is kept under, and the config that it was made from.
    _key: str
    _adapted: "dict[str, Any] | None" = None

    def export_weights(self, adapter_only: bool) -> Iterable[tuple[str, torch.Tensor]]:
        """Return full tensors under PEFT's (adapter) or Hugging Face's (base) names, on every rank. Collective.

        Weights whose tensors stay where they are, so that nothing is gathered, may be one tuple again and again; a sync
        then does not look through it once more.
        """
        raise NotImplementedError(f"{type(self).__name__} must define export_weights")

    def export_merged(self, changed_only: bool = False) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield full tensors, base plus adapter, under Hugging Face's names, on every rank. Collective.

        Args:
            changed_only: True leaves out the blocks that the adapter does not change.
        """
        raise NotImplementedError(f"{type(self).__name__} must define export_merged")

    def held_base(self) -> Iterable[Held]:
        """Return the base weights that this rank holds, and where; not a collective."""
        raise NotImplementedError(f"{type(self).__name__} must define held_base")

    def weights_to_send(self, kind: Kind) -> "Iterable[Named]":
        """Return what a sync sends, on every rank: like the exports, but each tensor may be deferred. Collective.

        Args:
            kind: ``"adapter"``, ``"base"`` or ``"merged"``; merged leaves out the blocks that the adapter does not
                change.
        """
        return self.export_merged(changed_only=True) if kind == "merged" else self.export_weights(kind == "adapter")

    def export_adapter_config(self) -> dict[str, Any]:
        """Return the adapter's ``adapter_config.json``, as ``peft.LoraConfig`` reads it."""
        raise NotImplementedError(f"{type(self).__name__} must define export_adapter_config")

    def policy_version(self) -> int:
        """Return the version of this rank's weights, by its own count of optimizer steps."""
        raise NotImplementedError(f"{type(self).__name__} must define policy_version")

    def place(self) -> Sender:
        """Return where this rank computes; not a collective."""
        return own_sender()

    def prepare_sync(self, config: CheckpointEngineConfig, receivers: int, senders: Sequence[int] = ()) -> bytes | None:
        """Open the transport on rank 0, and on every other rank that sends.

        Args:
            config: transport, bucket size, time limit.
            receivers: number of vLLM workers over all engines.
            senders: the rank that sends to each of them; empty: rank 0 sends to all.

        Returns:
            Where it was opened the endpoint as JSON: the transport's, with ``"stays"``; elsewhere None.

        Raises:
            WeightSyncError: the transport cannot be opened.
        """
        self.finish_sync()
        self._config, self._adapted = config, None
        indices = tuple(index for index, rank in enumerate(senders or [0] * receivers) if rank == self.rank)
        if self.rank != 0 and not indices:
            return None
        sender = open_sender(config.transport, Link(len(indices), config.timeout_seconds, indices))
        self._outbox = Outbox(sender, int(config.bucket_mib * 2**20))
        return json.dumps({"transport": config.transport, "stays": sender.stays} | sender.endpoint()).encode()

    def send_weights(self, version: int, kind: Kind) -> Sent | None:
        """Export the weights, and send them where the transport is open.

        Args:
            version: policy version of the weights.
            kind: ``"adapter"``, ``"base"`` or ``"merged"``.

        Returns:
            On a rank that sends what was sent and, if the transport stays connected, what arrived; elsewhere None.

        Raises:
            WeightSyncError: the weights have another version, and nothing is exported; or the transport failed. The
                export is run to its end in the second case, so that no other rank waits in a collective.
            Exception: the export raised it, on any rank.
        """
        if self._config is None:
            raise WeightSyncError("send_weights was called without prepare_sync")
        check_sync(version, kind)
        self._check_version(version)
        if self._outbox is not None:
            self._outbox.stages.begin()
        streams = self._streams(kind)
        if self._outbox is None:
            for stream in streams:
                _run_to_end(stream)
            return None
        try:
            plan = self._plan(streams) if kind == "adapter" else None
            sent = self._outbox.send(streams[-1], version, kind, plan).receipt
        except BaseException:
            # Keep the first error, which has the cause; the export may fail as well.
            with contextlib.suppress(Exception):
                for stream in streams:
                    _run_to_end(stream)
            raise
        sender, stages = self._outbox.sender, self._outbox.stages
        stages.end("wire")
        receipts = sender.receipts() if sender.stays else []
        stages.end("receipts")
        return Sent(replace(sent, seconds=stages.seconds).to_bytes(), receipts)

    def finish_sync(self) -> None:
        """Close the transport. Safe at any time, and may be called twice."""
        outbox, self._outbox, self._config = self._outbox, None, None
        if outbox is not None:
            outbox.sender.close()

    def lend_base(self) -> bytes:
        """Return where this rank holds its base weights, for an engine on the same GPU (``sampler.share_base``).

        The rank must keep them as long as the engine lives. An engine of several GPUs needs what the ranks on all of
        them return (``loan.joined``). Not a collective.

        Raises:
            WeightSyncError: the weights are not on a GPU, or none lies in one piece.
        """
        return lend(self.held_base()).to_bytes()

    def _streams(self, kind: Kind) -> "list[Iterable[Named]]":
        """Return the exports of a transfer: the weights, and before them once more those that a new plan reads."""
        if kind != "adapter":
            return [self.weights_to_send(kind)]
        assert self._config is not None
        self._plans = {} if self._plans is None else self._plans
        if self._adapted != (config := self.export_adapter_config()):
            self._adapted = config
            self._key = json.dumps([config, self._config.bucket_mib], sort_keys=True)
        new = self._key not in self._plans
        self._plans.setdefault(self._key, None)
        return [self.weights_to_send(kind) for _ in range(1 + new)]

    def _plan(self, streams: "list[Iterable[Named]]") -> Plan:
        """Return the plan of the active adapter, where it is sent; read it from the first of two exports if new."""
        assert self._config is not None and self._plans is not None
        if (plan := self._plans[self._key]) is None:
            if len(streams) == 1:
                # An earlier sync failed before there was a plan, or this rank did not send then. The other ranks run
                # one export: hold its tensors.
                streams[0] = list(streams[0])
            limit = int(self._config.bucket_mib * 2**20)
            plan = self._plans[self._key] = plan_of(streams[0], self.export_adapter_config(), limit)
        return plan

    def _check_version(self, version: int) -> None:
        """Raise ``WeightSyncError`` unless the weights are those of ``version``; the caller's count may be wrong."""
        if (actual := self.policy_version()) != version:
            raise WeightSyncError(
                f"trainer rank {self.rank} was asked to send policy version {version}, but its weights are those of "
                f"version {actual} (their number of optimizer steps)"
            )


def _run_to_end(weights: "Iterable[Named]") -> None:
    """Consume an export whose tensors this rank does not need, as its collectives require."""
    for _ in weights:
        pass
