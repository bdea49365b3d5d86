# SPDX-License-Identifier: Apache-2.0
"""Load base or merged weights into a running vLLM model by vLLM's own reload, and check that all are covered.

On a CPU vLLM keeps parameters in the kernels' own layout (prepacked). Weights therefore go through its layerwise
reload, which restores the checkpoint's layout, and loads and processes one layer at a time into the same storage. It
silently keeps the old value of a parameter that no tensor reaches; here that raises. ``direct`` is the way without it.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megarl.checkpoint_engine.buckets.stream import is_finite
from megarl.checkpoint_engine.receiver.experts import mixtures
from megarl.checkpoint_engine.receiver.weights.model_layout import Expected, Offered, layout_of
from megarl.checkpoint_engine.wire import listed
from megarl.errors import WeightSyncError

Named = tuple[str, torch.Tensor]


def load_weights(runner: Any, vllm_config: Any, weights: Iterable[Named], *, whole: bool) -> None:
    """Replace parameters of the model. All adapters are dropped.

    Args:
        runner: vLLM's model runner.
        vllm_config: the worker's config.
        weights: (Hugging Face name, full tensor) pairs, read one by one.
        whole: True requires every tensor of the model; False the tensors of whole layers of vLLM, where q, k and v are
            one layer, gate and up, and all experts of a block. The other layers keep their values.

    Raises:
        WeightSyncError: the model lacks a tensor, a tensor is not finite or has a wrong shape, or no tensor reached a
            parameter. The model is then partly replaced and must not be used.
        UnsupportedError: the experts are in a layout that a reload would not restore.
    """
    model = runner.get_model()
    layout = layout_of(model, getattr(runner, "lora_manager", None))
    expected = Expected(model, layout)

    def checked() -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield the tensors with the names by which vLLM loads them. Raises as ``load_weights`` does."""
        for name, tensor in weights:
            load = expected.take(name, tuple(tensor.shape))
            if not is_finite(tensor):
                raise WeightSyncError(f"tensor '{name}' holds a value that is not finite")
            yield name, load, tensor

    offered = Offered(checked())
    with set_current_vllm_config(vllm_config), torch.device(runner.device), layout.loading(), _quiet(not whole):
        owners = _owners(model)
        initialize_layerwise_reload(model)
        try:
            model.load_weights(iter(offered))
        except Exception as error:
            # Take the model out of the reload, so that a complete base can still be loaded.
            with suppress(Exception):
                finalize_layerwise_reload(model, vllm_config.model_config)
            if isinstance(error, WeightSyncError) or not isinstance(error, AssertionError | ValueError | RuntimeError):
                raise
            raise offered.refused(error) from error
        came = owners if whole else expected.came()
        untouched = [name for name, layer in owners.items() if name in came and _is_untouched(layer)]
        finalize_layerwise_reload(model, vllm_config.model_config)
        _repack_tied(model, owners)
    expected.check_all(whole)
    if untouched:
        raise WeightSyncError(f"layers that vLLM's reload did not fill: {listed(untouched)}")
    drop_adapters(runner)


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """Keep vLLM from warning of each layer that gets no weights."""
    logger = logging.getLogger(initialize_layerwise_reload.__module__)
    before = logger.level
    logger.setLevel(logging.ERROR if quiet else before)
    try:
        yield
    finally:
        logger.setLevel(before)


def _owners(model: Any) -> dict[str, Any]:
    """Map names to layers with parameters of their own. A tied parameter belongs to the first layer that has it."""
    seen: set[int] = set()
    owners = {}
    for name, layer in model.named_modules():
        parameters = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if parameters - seen:
            owners[name] = layer
        seen |= parameters
    return owners


def _is_untouched(layer: Any) -> bool:
    """Return True if, by vLLM's count, nothing was loaded into the layer, or not everything of a layer of experts."""
    info = get_layerwise_info(layer)
    return info.can_load() and (not info.load_numel or mixtures.holds_base(layer))


def _repack_tied(model: Any, owners: dict[str, Any]) -> None:
    """Process layers whose parameters are tied to another layer's, which the reload skips.

    On a CPU an output layer tied to the embedding uses a packed copy of its own, which would keep the old values.
    """
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        tied = name not in owners and any(True for _ in layer.parameters(recurse=False))
        if tied and isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)


def drop_adapters(runner: Any) -> None:
    """Drop all adapters. vLLM 0.32 requires it (its LoRA state refers to the old base); 0.26 must behave alike."""
    if getattr(runner, "lora_manager", None) is None:
        return
    if hasattr(runner, "reset_lora_state"):
        runner.reset_lora_state()
    else:
        runner.lora_manager.remove_all_adapters()
