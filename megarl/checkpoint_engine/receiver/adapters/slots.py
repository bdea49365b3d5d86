# SPDX-License-Identifier: Apache-2.0
"""Hold adapters in vLLM's LoRA slots: write a version into an idle slot, verify it, let vLLM use it.

vLLM keeps every slot's matrices in tensors of a fixed place, which the kernels of all requests read. An adapter is
written straight into those of an idle slot, while requests of other versions run. vLLM learns of the slot when the
first request of the new version comes: it then asks for the adapter and activates it, and gets the slot's number
instead of weights. Nothing else in vLLM is told of a version that was not verified.
"""

from typing import Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest

from megarl.checkpoint_engine.buckets.digests import RepeatedDigests
from megarl.checkpoint_engine.buckets.stream import Inbox
from megarl.checkpoint_engine.receiver.adapters.adapter_plan import SlotPlan, buffers_of, plan_slot
from megarl.checkpoint_engine.receiver.experts import mixtures
from megarl.checkpoint_engine.receiver.writers.jobs import Writes
from megarl.checkpoint_engine.receiver.writers.prepare import prepare
from megarl.checkpoint_engine.records import Receipt
from megarl.checkpoint_engine.wire import Plan
from megarl.errors import WeightSyncError


class Slots:
    """The slots of one worker.

    Args:
        manager: vLLM's worker LoRA manager, whose loading and activation this object takes over.
    """

    def __init__(self, manager: Any) -> None:
        self._manager, self._inner = manager, manager._adapter_manager
        self._slot_of: dict[int, int] = {}
        self._checksums: dict[int, str] = {}
        self._plans: dict[bytes, SlotPlan] = {}
        # Of the plan that came last, by slot and bucket.
        self._writes: dict[tuple[int, int], Writes] = {}
        self._begin_digests = RepeatedDigests()
        manager._load_adapter = self._load
        self._inner._add_adapter = self._add
        self._inner.activate_adapter = self._activate

    @property
    def staged(self) -> list[int]:
        """LoRA ids of the verified versions."""
        return sorted(self._slot_of)

    def keep(self, lora_ids: list[int]) -> None:
        """Forget all other versions; their slots are idle then. Call it between two steps of the engine."""
        for lora_id in self._slot_of.keys() - set(lora_ids):
            self._inner.remove_adapter(lora_id)
            del self._slot_of[lora_id]

    def capture(self) -> None:
        """Make further transfers into the same slots cheaper. Call it between two steps of the engine."""
        self._begin_digests.capture()
        for writes in self._writes.values():
            writes.capture()

    def clear(self) -> None:
        """Forget all versions, after vLLM dropped them."""
        self._slot_of.clear()

    def idle(self) -> int | None:
        """Return the number of an idle slot; None if all are in use."""
        return min(set(range(self._inner.lora_slots)) - set(self._slot_of.values()), default=None)

    def stage(self, inbox: Inbox, slot: int | None) -> Receipt:
        """Receive an adapter into an idle slot, and read back what the slot holds.

        A version that is already held must come with the same weights, and stays in its slot.

        Args:
            inbox: the transfer.
            slot: an idle slot, or None if there is none.

        Raises:
            WeightSyncError: a tensor is damaged, missing, unexpected, not finite or of a wrong shape, the slot does not
                hold what was written, or no slot is idle.
            AdapterError, UnsupportedError: as ``plan_slot``.
        """
        plan, written = None, []
        for number, (bucket, payload, _) in enumerate(inbox.buckets(self._begin_digests)):
            if bucket.plan is None:
                raise WeightSyncError("the adapter came without its plan")
            plan = self._plan(bucket.plan)
            if bucket.version + 1 not in self._slot_of:
                # What it writes may be damaged; nobody uses the slot before all is checked.
                written.append(self._writes_of(plan, slot, number).run(payload))
        manifest, receipt = inbox.finish()
        for found in written:
            found().refuse("adapter")
        if plan is None:
            raise WeightSyncError("the adapter came without any tensor")
        lora_id = manifest.version + 1
        if lora_id not in self._slot_of:
            assert slot is not None  # it was written to
            self._switch_experts(plan, slot)
            self._slot_of[lora_id], self._checksums[lora_id] = slot, receipt.checksum
        elif self._checksums[lora_id] != receipt.checksum:
            # Other weights under its name would be sampled with the KV of these.
            raise WeightSyncError(f"version {manifest.version} came again with other weights than before")
        return receipt

    def _writes_of(self, plan: SlotPlan, slot: int | None, bucket: int) -> Writes:
        """Return the writes of a bucket into a slot; prepared once."""
        if slot is None:
            raise WeightSyncError(f"all {self._inner.lora_slots} LoRA slots are in use")
        key = slot, bucket
        if key not in self._writes:
            self._writes[key] = prepare(plan.writes(bucket, buffers_of(self._manager, slot)))
        return self._writes[key]

    def _switch_experts(self, plan: SlotPlan, slot: int) -> None:
        """Tell vLLM's mixtures which of them the slot adapts."""
        for module, adapted in plan.experts:
            mixtures.switch(module, slot, adapted)
            if not mixtures.is_switched(module, slot, adapted):
                raise WeightSyncError(f"vLLM's experts do not take slot {slot}")

    def _plan(self, plan: Plan) -> SlotPlan:
        """Return the jobs of an adapter; worked out once."""
        key = plan.key
        if key not in self._plans:
            self._plans, self._writes = {key: plan_slot(self._manager, plan)}, {}
            self._begin_digests = RepeatedDigests()
        return self._plans[key]

    def _load(self, request: LoRARequest) -> LoRAModel:
        """Stand in for an adapter whose weights are in their slot; replaces vLLM's reading from disk."""
        if request.lora_int_id not in self._slot_of:
            raise WeightSyncError(f"adapter '{request.lora_name}' was never received; there is nothing to load")
        return LoRAModel(request.lora_int_id, 1, {})

    def _add(self, model: LoRAModel) -> None:
        """Register a version; replaces vLLM's stacking of its weights."""
        self._inner._registered_adapters[model.id] = model

    def _activate(self, lora_id: int) -> bool:
        """Tell vLLM's kernels the slot of a version; replaces vLLM's copying of weights into a slot."""
        inner = self._inner
        activated = lora_id not in inner._active_adapters
        if activated:
            if lora_id not in self._slot_of:
                raise WeightSyncError(f"LoRA id {lora_id} has no slot")
            inner._active_adapters[lora_id] = None
            inner.lora_index_to_id[self._slot_of[lora_id]] = lora_id
        inner._active_adapters.touch(lora_id)
        return activated
