# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of settings: a model's config, and a recipe for it."""

import json

import pytest

from tests.unit.config.recipes import SHAPE


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture
def recipe(tmp_path, model):
    file = tmp_path / "run.yaml"
    file.write_text(f"model:\n  path: {model}\ntask:\n  name: arithmetic\n")
    return file
