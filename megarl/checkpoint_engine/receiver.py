# SPDX-License-Identifier: Apache-2.0
"""vLLM worker extension that receives weights, verifies them and hands them to vLLM.

Name it as ``worker_extension_cls="megarl.checkpoint_engine.receiver.ReceiverExtension"`` and call its methods with
``collective_rpc``. Arguments and results are bytes, str or int, because tensors inside untyped RPC arguments do not
decode. Works with vLLM 0.26 (CUDA) and 0.32 (CPU). The methods run in the engine's own loop, between two steps.
"""

import json
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from megarl.checkpoint_engine import receiver_cpu, receiver_cpu_moe, receiver_plain, receiver_router
from megarl.checkpoint_engine.base import open_receiver
from megarl.checkpoint_engine.receiver_base import load_weights
from megarl.checkpoint_engine.receiver_lora import StagedAdapter, adapter_differences, build_lora_model, stage_adapter
from megarl.checkpoint_engine.receiver_moe import check_engine
from megarl.checkpoint_engine.stream import Inbox
from megarl.checkpoint_engine.wire import Receipt, check_sync, listed
from megarl.errors import MegarlError, WeightSyncError

# vLLM imports this module before it builds the model. Later would be too late: it then runs the model and captures
# graphs.
receiver_router.install()
if current_platform.is_cpu():
    receiver_cpu.install()
    receiver_cpu_moe.install()


class ReceiverExtension:
    """Mixed into vLLM's ``Worker``. Holds adapters by LoRA id as long as they are resident."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _megarl_staged: dict[int, StagedAdapter]
    _megarl_changed: set[str]

    def megarl_start(self, merged: bool) -> int:
        """Make vLLM read adapters from the staged ones instead of from disk. Returns this worker's rank.

        Args:
            merged: True if merged weights will come, which need an engine without LoRA.

        Raises:
            WeightSyncError: the engine was started without LoRA, or, for merged weights, with it.
            UnsupportedError: the engine holds experts in a layout that is not tested.
        """
        self._megarl_staged, self._megarl_changed = {}, set()
        manager = getattr(self.model_runner, "lora_manager", None)
        if merged != (manager is None):
            raise WeightSyncError(f"the engine was started with{'' if merged else 'out'} enable_lora")
        if manager is None:
            receiver_plain.check_engine(self.model_runner.get_model())
            return self.rank
        check_engine(manager._adapter_manager)
        manager._load_adapter = self._megarl_load_adapter
        return self.rank

    def megarl_receive(self, endpoint: bytes, first: int) -> bytes:
        """Receive one transfer. An adapter is staged, a base or merged weights are loaded.

        Args:
            endpoint: the sender's endpoint as JSON.
            first: receiver index of this engine's first worker.

        Returns:
            ``Receipt.to_bytes``.

        Raises:
            WeightSyncError: the transport failed; or a tensor is damaged, missing, unexpected, not finite or of a wrong
                shape.
        """
        index = first + self.rank
        announced = json.loads(endpoint)
        receiver = open_receiver(announced, index)
        try:
            check_sync(announced["version"], announced["kind"])
            inbox = Inbox(receiver, index)
            if announced["kind"] == "adapter":
                receipt = self._megarl_take_adapter(inbox)
            else:
                receipt = self._megarl_load(inbox, whole=announced["kind"] == "base")
            for asked in ("version", "kind"):
                if getattr(receipt, asked) != announced[asked]:
                    raise WeightSyncError(
                        f"{asked} {announced[asked]!r} was announced, {getattr(receipt, asked)!r} came"
                    )
            return receipt.to_bytes()
        except Exception as error:
            receiver.fail(str(error))
            if isinstance(error, MegarlError):
                raise
            raise WeightSyncError(f"receiver {index}: {error!r}") from error
        finally:
            receiver.close()

    def megarl_differences(self, lora_id: int) -> list[str]:
        """Name the modules whose weights in the kernels' buffers differ in any bit from the staged adapter."""
        staged = self._megarl_staged.get(lora_id)
        if staged is None:
            return [f"LoRA id {lora_id} is not staged"]
        return adapter_differences(self.model_runner.lora_manager, staged, lora_id)

    def megarl_drop(self, lora_id: int) -> None:
        """Drop a staged adapter. vLLM's copy is dropped by ``remove_lora``."""
        self._megarl_staged.pop(lora_id, None)

    def megarl_resident(self) -> tuple[list[int], list[int]]:
        """Return the LoRA ids that are staged, and those that vLLM holds."""
        manager = getattr(self.model_runner, "lora_manager", None)
        return sorted(self._megarl_staged), sorted(manager.list_adapters()) if manager else []

    def _megarl_take_adapter(self, inbox: Inbox) -> Receipt:
        """Stage an adapter. Its tensors are cloned, because a view would keep the transport's bucket alive."""
        tensors = {name: tensor.clone() for name, tensor in inbox}
        manifest, receipt = inbox.finish()
        manager = self.model_runner.lora_manager
        self._megarl_staged[manifest.version + 1] = stage_adapter(manager, tensors, manifest.adapter_config or {})
        return receipt

    def _megarl_load(self, inbox: Inbox, whole: bool) -> Receipt:
        """Load weights as they arrive: those of the whole model, or of the blocks that came.

        Raises:
            WeightSyncError: also if blocks of an earlier version would stay, because these weights lack them.
        """
        self._megarl_staged.clear()
        load_weights(self.model_runner, self.vllm_config, inbox, whole=whole)
        manifest, receipt = inbox.finish()
        came = set() if whole else {place.name for place in manifest.tensors.places}
        if not whole and (left := self._megarl_changed - came):
            raise WeightSyncError(
                f"merged version {manifest.version} lacks {listed(left)}, which an earlier version changed; sync kind "
                "'base' first"
            )
        self._megarl_changed = came
        return receipt

    def _megarl_load_adapter(self, request: LoRARequest) -> Any:
        """Return a staged adapter; replaces vLLM's reading from disk."""
        staged = self._megarl_staged.get(request.lora_int_id)
        if staged is None:
            raise WeightSyncError(f"adapter '{request.lora_name}' was never received; there is nothing to load")
        return build_lora_model(self.model_runner.lora_manager, staged, request.lora_int_id)
