# SPDX-License-Identifier: Apache-2.0
"""Check what sampler.share_base refuses."""

from dataclasses import replace
from typing import Any

import pytest

from megarl.config import CheckpointEngineConfig, SamplerConfig, parse_config
from megarl.errors import ConfigError, UnsupportedError
from megarl.sampler.engine.device_checks import check_device, check_loan
from megarl.sampler.engine.settings import engine_arguments
from tests.e2e.sampler_rig import make_model

SHARES = {"share_gpus": True, "share_base": True}
WIDE = SHARES | {"parallel": {"tensor": 2}}


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"sampler": {"share_base": True}}, "sampler.share_gpus none (set it to true)"),
        ({"sampler": SHARES, "checkpoint_engine": {"content": "merged"}}, "checkpoint_engine.content merged"),
        ({"sampler": SHARES, "checkpoint_engine": {"base_weights": "disk"}}, "checkpoint_engine.base_weights disk"),
        ({"sampler": SHARES, "train": {"device": "cpu"}}, "train.device cpu (it needs GPUs)"),
        ({"sampler": SHARES, "parallel": {"tensor": 2}}, "parallel.tensor 2 and sampler.parallel.tensor 1 (set both"),
        ({"sampler": SHARES, "parallel": {"pipeline": 2}}, "parallel.pipeline 2 (no rank holds all layers"),
        ({"sampler": WIDE, "parallel": {"tensor": 4, "expert_tensor": 4}}, "parallel.tensor 4 and sampler.parallel"),
        ({"sampler": WIDE, "parallel": {"tensor": 2, "expert_tensor": 4, "data": 2}}, "parallel.expert_tensor 4 and"),
        ({"sampler": SHARES, "parallel": {"expert": 2, "data": 2}}, "parallel.expert 2"),
        ({"sampler": WIDE}, "parallel.tensor 1 and sampler.parallel.tensor 2 (set both alike"),
    ],
)
def test_what_holds_no_whole_base_or_would_write_into_it_is_refused(sections: dict[str, Any], named: str) -> None:
    base: dict[str, Any] = {"model": {"path": "."}, "task": {"name": "arithmetic"}}
    parse_config(base | {"sampler": SHARES, "parallel": {"data": 2, "context": 2}})
    parse_config(base | {"sampler": WIDE, "parallel": {"data": 2, "tensor": 2, "expert_tensor": 2}})
    with pytest.raises(ConfigError) as raised:
        parse_config(base | sections)
    assert f"sampler.share_base is true with {named}" in str(raised.value)


def test_an_engine_asks_for_the_loan_on_a_gpu_and_is_refused_on_a_cpu(tmp_path: Any) -> None:
    make_model("qwen2", tmp_path)
    base: dict[str, Any] = {"model": {"path": str(tmp_path)}, "task": {"name": "arithmetic"}, "sampler": SHARES}
    engine = parse_config(base).engine
    arguments = engine_arguments(engine, 0, "cuda", "/a/loan")
    assert arguments["load_format"] == "megarl_borrowed"
    assert arguments["model_loader_extra_config"] == {"loan": "/a/loan"}
    assert engine_arguments(engine, 0, "cuda")["load_format"] == "dummy"
    check_device(engine, "cuda")
    check_loan(engine, b"loan")
    with pytest.raises(ConfigError, match=r"sampler\.share_base is true, but the engine gets no loan: give it what"):
        check_loan(engine, b"")
    with pytest.raises(ConfigError, match=r"sampler\.share_base is false, but the engine gets a loan"):
        check_loan(replace(engine, sampler=SamplerConfig()), b"loan")
    merged = replace(engine, checkpoint_engine=CheckpointEngineConfig(content="merged"))
    with pytest.raises(ConfigError, match=r"content merged and base_weights send; it needs adapter and send"):
        check_loan(merged, b"loan")
    with pytest.raises(UnsupportedError, match=r"sampler\.share_base is true, which needs GPUs"):
        check_device(engine, "cpu")
