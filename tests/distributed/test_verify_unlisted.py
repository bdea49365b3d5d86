# SPDX-License-Identifier: Apache-2.0
"""Run `megarl verify` on an architecture that only transformers has, and check that it finds a mutation."""

from pathlib import Path

import pytest

from megarl.cli.main import main
from tests.helpers.architectures import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("unlisted") / "model", "glm4", vocab_size=131)


def test_every_row_passes(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model), "model.backend=transformers", "model.dtype=float32", "lora.r=4"]) == 0
    assert capfd.readouterr().out.count(" yes ") == 13


def test_a_mixture_passes_every_row_but_those_of_what_cannot_be_exported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 131, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    mixture = write_model(tmp_path / "model", "olmoe", **sizes)
    assert main(["verify", str(mixture), "model.backend=transformers", "model.dtype=float32", "lora.r=4"]) == 0
    shown = capfd.readouterr()
    assert shown.out.count(" yes ") == 9
    assert "not exported, and so not compared, are merged and base weights" in shown.out + shown.err


def test_megatron_refuses_it_and_says_what_takes_it(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model), "model.dtype=float32"]) == 2
    assert "any model of transformers trains with model.backend=transformers" in capfd.readouterr().err
