# SPDX-License-Identifier: Apache-2.0
"""Refuse a back end that cannot compute exactly what was asked for, before anything is built."""

import importlib.util

import pytest
import torch

from megarl.config import ModelConfig
from megarl.errors import UnsupportedError
from megarl.model.layers import backends

TE = ModelConfig(path="somewhere", backend="te")
CUDA = torch.device("cuda")


def test_transformer_engine_needs_a_gpu_and_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        backends.backend_settings(TE, torch.bfloat16, torch.device("cpu"), experts=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="not installed"):
        backends.backend_settings(TE, torch.bfloat16, CUDA, experts=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert backends.backend_settings(TE, torch.bfloat16, CUDA, experts=False)["apply_rope_fusion"]
