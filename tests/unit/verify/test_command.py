# SPDX-License-Identifier: Apache-2.0
"""Check that `megarl verify` refuses what it could not judge, before any process is started."""

import pytest

from megarl.errors import ConfigError
from megarl.verify import command
from megarl.verify.inputs.adapters import make_adapter
from megarl.verify.inputs.settings import verify_config
from tests.helpers.models import make_model


def test_an_adapter_with_dropout_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "verify_places", lambda *args, **kwargs: pytest.fail("a process was started"))
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    adapter = make_adapter(model, tmp_path / "adapter", lora_dropout=0.05)
    config = verify_config(model, [f"lora.init_from={adapter}"])
    with pytest.raises(ConfigError, match=r"lora_dropout of lora\.init_from '.*adapter' is 0\.05; .* verify needs 0"):
        command.verify_model(config, print)
