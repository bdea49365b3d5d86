# SPDX-License-Identifier: Apache-2.0
"""Check that a model or a setting that vLLM's kernels lack on a device is refused before an engine starts."""

import ast
import json
from pathlib import Path

import pytest

from megarl.config import RunConfig
from megarl.errors import UnsupportedError
from megarl.sampler.engine import device_checks
from tests.unit.sampler.engine.test_settings import config, vllm_source


@pytest.mark.parametrize(
    ("shape", "size"), [({"head_dim": 16}, 16), ({"hidden_size": 96, "num_attention_heads": 4, "head_dim": None}, 24)]
)
def test_a_head_size_that_vllms_cpu_kernels_lack_is_refused_on_a_cpu_only(
    tmp_path: Path, shape: dict, size: int
) -> None:
    run = config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(UnsupportedError, match=rf"attention heads of size {size} \(head_dim\) on a CPU; .* 32, 64, 80"):
        device_checks.check_device(run, "cpu")
    device_checks.check_device(run, "cuda")
    (tmp_path / "config.json").write_text(json.dumps(shape | {"head_dim": 64}))
    device_checks.check_device(run, "cpu")


def test_adapters_in_float32_are_refused_on_gpus_whose_kernels_in_vllm_lack_them(tmp_path: Path) -> None:
    run = settled(tmp_path, "adapter")
    with pytest.raises(UnsupportedError, match=r"use bfloat16, or checkpoint_engine.content=merged"):
        device_checks.check_device(run.engine, "cuda")
    device_checks.check_device(run.engine, "cpu")
    device_checks.check_device(settled(tmp_path, "merged").engine, "cuda")
    kernel = vllm_source("lora/ops/triton_ops/lora_shrink_op.py")
    assert "assert weight.dtype in [torch.float16, torch.bfloat16]" in kernel


def settled(folder: Path, content: str) -> RunConfig:
    model = {"path": str(folder), "dtype": "float32"}
    return config(folder, model=model, checkpoint_engine={"content": content})


def test_the_cpu_head_sizes_are_vllms() -> None:
    tree = ast.parse(vllm_source("v1/attention/backends/cpu_attn.py"))
    [method] = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "get_supported_head_sizes"]
    [returned] = [n for n in ast.walk(method) if isinstance(n, ast.Return)]
    assert tuple(ast.literal_eval(returned.value)) == device_checks.CPU_HEAD_SIZES
