# SPDX-License-Identifier: Apache-2.0
"""vLLM prepares no embedding and no output head for adapters: nothing samples with them, and its head is not safe."""

from types import SimpleNamespace

import pytest
from vllm.lora.model_manager import LoRAModelManager

from megarl.checkpoint_engine.receiver.adapters import embeddings
from megarl.errors import UnsupportedError


def test_vllm_is_asked_for_linears_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        LoRAModelManager, "_create_lora_modules", lambda manager: asked.extend(manager.supported_lora_modules)
    )
    embeddings.install()
    manager = SimpleNamespace(supported_lora_modules=["qkv_proj", "embed_tokens", "lm_head", "head_proj"], modules={})
    LoRAModelManager._create_lora_modules(manager)
    assert asked == ["qkv_proj", "head_proj"]


@pytest.mark.parametrize("name", ["lm_head", "language_model.model.embed_tokens"])
def test_a_release_that_prepares_them_nevertheless_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(LoRAModelManager, "_create_lora_modules", lambda manager: manager.modules.update({name: None}))
    embeddings.install()
    manager = SimpleNamespace(supported_lora_modules=[], modules={"model.layers.0.mlp.down_proj": None})
    with pytest.raises(UnsupportedError, match=f"prepared '{name}'.*leave them out of sampler.engine_args"):
        LoRAModelManager._create_lora_modules(manager)
