# SPDX-License-Identifier: Apache-2.0
"""Extend vLLM's workers: receive weights, verify them and hand them to vLLM.

Name it as ``worker_extension_cls="megarl.checkpoint_engine.receiver.extension.ReceiverExtension"`` and call its methods
with ``collective_rpc``. Arguments and results are bytes, str or int, because tensors inside untyped RPC arguments do
not decode. Works with vLLM 0.26 (CUDA) and 0.32 (CPU). The methods run in the engine's own loop, between two steps.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.platforms import current_platform

from megarl.checkpoint_engine.base import Receiver, open_receiver
from megarl.checkpoint_engine.buckets.stream import Inbox
from megarl.checkpoint_engine.choice import Memory, Sender, own_receiver
from megarl.checkpoint_engine.receiver import cpu_kernels
from megarl.checkpoint_engine.receiver.adapters import embeddings
from megarl.checkpoint_engine.receiver.adapters.slots import Slots
from megarl.checkpoint_engine.receiver.adapters.stage import Stage
from megarl.checkpoint_engine.receiver.experts import cpu_mixtures, plain_mixtures, routers
from megarl.checkpoint_engine.receiver.experts.mixtures import check_engine
from megarl.checkpoint_engine.receiver.weights import borrowed
from megarl.checkpoint_engine.receiver.weights.base_weights import load_weights
from megarl.checkpoint_engine.receiver.weights.direct import DirectLoader, takes_direct_writes
from megarl.checkpoint_engine.records import Receipt, check_sync
from megarl.checkpoint_engine.wire import Book, listed
from megarl.errors import MegarlError, UnsupportedError, WeightSyncError

# vLLM imports this module before it builds the model. Later would be too late: it then runs the model and captures
# graphs.
routers.install()
embeddings.install()
if current_platform.is_cpu():
    cpu_kernels.install()
    cpu_mixtures.install()


Take = Callable[[Inbox], Receipt]


# Seconds that a thread needs at most to notice that its connection is closed.
RESET_SECONDS = 20.0


@dataclass
class Connection:
    """An open receiver, and what has come through it."""

    receiver: Receiver
    index: int
    book: Book = field(default_factory=Book)

    def run(self, take: Take, announced: dict[str, Any]) -> bytes:
        """Run one transfer; return the receipt, or send it if the connection stays.

        Raises:
            WeightSyncError: the transfer failed, or other weights came than were announced. The sender is told.
        """
        with self._failures_told():
            check_sync(announced["version"], announced["kind"])
            receipt = take(Inbox(self.receiver, self.index, self.book))
            for asked in ("version", "kind"):
                if getattr(receipt, asked) != announced[asked]:
                    raise WeightSyncError(
                        f"{asked} {announced[asked]!r} was announced, {getattr(receipt, asked)!r} came"
                    )
            if not self.receiver.stays:
                return receipt.to_bytes()
            self.receiver.answer(receipt.to_bytes())
            return b""

    def wait_and_run(self, take: Take) -> None:
        """Wait until the sender begins a transfer, run it, and answer. The answer says what came, or why it failed."""
        if self.receiver.begins():
            with contextlib.suppress(WeightSyncError), self._failures_told():
                self.receiver.answer(take(Inbox(self.receiver, self.index, self.book)).to_bytes())

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        """Tell the sender of a failure, and raise it as a megarl error."""
        try:
            yield
        except Exception as error:
            self.receiver.fail(str(error))
            if isinstance(error, MegarlError):
                raise
            raise WeightSyncError(f"receiver {self.index}: {error!r}") from error


def key_of(announced: dict[str, Any]) -> str:
    """Return what names a sender in its endpoint, which also says what it will send."""
    return json.dumps({name: value for name, value in announced.items() if name not in ("version", "kind")})


class ReceiverExtension:
    """Mixed into vLLM's ``Worker``. Holds adapters in LoRA slots as long as they are resident."""

    model_runner: Any
    vllm_config: Any
    rank: int
    device: Any
    _megarl_slots: Slots | None
    _megarl_direct: DirectLoader | None
    _megarl_changed: set[str]
    _megarl_connections: dict[str, Connection]
    _megarl_thread: threading.Thread | None

    def megarl_start(self, merged: bool) -> int:
        """Make vLLM take adapters from their slots instead of from disk. Returns this worker's rank.

        Args:
            merged: True if merged weights will come, which need an engine without LoRA.

        Raises:
            WeightSyncError: the engine was started without LoRA, or, for merged weights, with it.
            UnsupportedError: the engine holds experts in a layout that is not tested, or borrows weights that a reload
                would write over.
        """
        self._megarl_slots, self._megarl_changed = None, set()
        self._megarl_connections, self._megarl_thread = {}, None
        direct = takes_direct_writes(self.model_runner.get_model())
        self._megarl_direct = DirectLoader(self.model_runner, self.vllm_config) if direct else None
        if borrowed.summary().borrowed and not direct:
            raise UnsupportedError(
                "sampler.share_base is true, but vLLM changes the layout of this model's weights after it has loaded "
                "them; set it to false"
            )
        manager = getattr(self.model_runner, "lora_manager", None)
        if merged != (manager is None):
            raise WeightSyncError(f"the engine was started with{'' if merged else 'out'} enable_lora")
        if manager is None:
            plain_mixtures.check_engine(self.model_runner.get_model())
            return self.rank
        check_engine(manager._adapter_manager)
        self._megarl_slots = Slots(manager)
        return self.rank

    def megarl_borrowed(self) -> list[Any]:
        """Return what this worker borrows of the trainer; see ``borrowed.Summary``."""
        return list(borrowed.summary())

    def megarl_place(self, host: str, gpu: str, offer: bytes) -> list[Any]:
        """Return the memory that this worker computes in, and whether it reads a sender's; see ``choice.Sender``."""
        memory, reads = own_receiver(Sender(Memory(host, gpu), offer))
        return [*memory, reads]

    def megarl_receive(self, endpoint: bytes, first: int, kept: list[int]) -> bytes:
        """Receive one transfer. An adapter goes into an idle LoRA slot; a base or merged weights are loaded.

        Args:
            endpoint: the sender's endpoint as JSON, with ``"version"`` and ``"kind"``.
            first: receiver index of this engine's first worker.
            kept: LoRA ids that are current or that requests use; the slots of all others become free.

        Returns:
            ``Receipt.to_bytes``; nothing if the sender gets it.

        Raises:
            WeightSyncError: the transport failed; or a tensor is damaged, missing, unexpected, not finite or of a wrong
                shape.
        """
        announced = json.loads(endpoint)
        connection = self._megarl_connect(announced, first + self.rank)
        try:
            if announced["kind"] != "adapter":
                whole = announced["kind"] == "base"
                return connection.run(lambda inbox: self._megarl_load(inbox, whole), announced)
            stage = self._megarl_stage(kept)
            with stage.ready():
                return connection.run(stage, announced)
        finally:
            if not connection.receiver.stays:
                connection.receiver.close()

    def megarl_arm(self, endpoint: bytes, first: int, kept: list[int]) -> None:
        """Let a thread wait for the next adapter, and receive it while the engine goes on. The sender gets the receipt.

        Only for a transport that stays connected. Until the thread is done, nothing else may come that way.

        Args:
            endpoint: as for ``megarl_receive``; its version and kind do not count.
            first, kept: as for ``megarl_receive``.

        Raises:
            WeightSyncError: the sender cannot be reached, or the engine has no LoRA slots.
        """
        connection = self._megarl_connect(json.loads(endpoint), first + self.rank)
        stage = self._megarl_stage(kept)

        def run() -> None:
            with stage.ready():
                connection.wait_and_run(stage)

        self._megarl_thread = threading.Thread(target=run, daemon=True)
        self._megarl_thread.start()

    def megarl_decline(self, endpoint: bytes, first: int, reason: str) -> None:
        """Tell a sender that its transfer will not be taken; it would wait for this receiver otherwise.

        Args:
            endpoint, first: as for ``megarl_receive``.
            reason: what the sender raises.

        Raises:
            WeightSyncError: the sender cannot be reached.
        """
        connection = self._megarl_connect(json.loads(endpoint), first + self.rank)
        self._megarl_connections = {}
        connection.receiver.fail(reason)
        connection.receiver.close()

    def megarl_reset(self) -> None:
        """Disconnect from every sender, and drop all adapters. No request may run.

        Raises:
            WeightSyncError: a thread still writes into a slot.
        """
        for connection in self._megarl_connections.values():
            connection.receiver.close()
        self._megarl_connections = {}
        if self._megarl_thread is not None:
            self._megarl_thread.join(RESET_SECONDS)
            if self._megarl_thread.is_alive():
                raise WeightSyncError(f"the transfer before did not end within {RESET_SECONDS:g} s")
        if self._megarl_slots is not None:
            self._megarl_slots.keep([])

    def megarl_resident(self) -> tuple[list[int], list[int]]:
        """Return the LoRA ids that are staged, and those that vLLM holds."""
        slots, manager = self._megarl_slots, getattr(self.model_runner, "lora_manager", None)
        return slots.staged if slots else [], sorted(manager.list_adapters()) if manager else []

    def _megarl_connect(self, announced: dict[str, Any], index: int) -> Connection:
        """Return the open connection to a sender, or a new one; connections to other senders are closed."""
        key = key_of(announced)
        connection = self._megarl_connections.get(key)
        if connection is None:
            for old in self._megarl_connections.values():
                old.receiver.close()
            connection = Connection(open_receiver(announced, index), index)
            self._megarl_connections = {key: connection} if connection.receiver.stays else {}
        return connection

    def _megarl_stage(self, kept: list[int]) -> Stage:
        """Return what takes the next adapter; see ``Stage``."""
        if self._megarl_slots is None:
            raise WeightSyncError("adapter weights came, but the engine has no LoRA slots")
        return Stage(self._megarl_slots, kept, torch.device(self.device))

    def _megarl_load(self, inbox: Inbox, whole: bool) -> Receipt:
        """Load weights as they arrive: those of the whole model, or of the blocks that came.

        Raises:
            WeightSyncError: also if blocks of an earlier version would stay, because these weights lack them.
        """
        if self._megarl_slots is not None:
            self._megarl_slots.clear()
        if self._megarl_direct is not None:
            manifest, receipt = self._megarl_direct.load(inbox, whole=whole)
        else:
            load_weights(self.model_runner, self.vllm_config, inbox.tensors(), whole=whole)
            manifest, receipt = inbox.finish()
        came = set() if whole else {place.name for place in manifest.tensors.places}
        if not whole and (left := self._megarl_changed - came):
            raise WeightSyncError(
                f"merged version {manifest.version} lacks {listed(left)}, which an earlier version changed; sync kind "
                "'base' first"
            )
        self._megarl_changed = came
        return receipt
