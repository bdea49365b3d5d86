# SPDX-License-Identifier: Apache-2.0
"""Load the recipes under examples/ and build their tasks; the arithmetic one fits two CPU cores."""

import json
import re
from pathlib import Path

import pytest

from megarl.config import RunConfig, load_config
from megarl.errors import ConfigError
from megarl.tasks import TaskContext, build_task
from tests.unit.tasks.support import make

EXAMPLES = Path(__file__).parents[3] / "examples"
RECIPES = ["arithmetic", "countdown", "gsm8k"]


@pytest.fixture
def model(tmp_path):
    shape = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "num_hidden_layers": 30}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 8192}))
    return tmp_path


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_loads_and_its_task_builds(name, model, monkeypatch):
    monkeypatch.setenv("MEGARL_MODEL", str(model))
    folder = EXAMPLES / name
    config = load_config(folder / "run.yaml")
    assert config.model.path == str(model)
    assert config == load_config(folder / "run.yaml", [f"model.path={model}"])
    task = build_task(TaskContext(config.task, folder, config.train.seed))
    assert len(task) >= config.train.prompts_per_step
    assert task.reward(task[0], "").score == 0.0


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_without_a_model_says_which_key_is_missing(name, monkeypatch):
    monkeypatch.delenv("MEGARL_MODEL", raising=False)
    with pytest.raises(ConfigError, match=r"key 'model\.path'.*MEGARL_MODEL"):
        load_config(EXAMPLES / name / "run.yaml")


def test_the_arithmetic_recipe_is_for_two_cores(model):
    config = load_config(EXAMPLES / "arithmetic" / "run.yaml", [f"model.path={model}"])
    assert (config.parallel.world_size, config.parallel.data, config.sampler.engines) == (2, 2, 1)
    assert (config.train.prompts_per_step, config.sampler.samples_per_prompt) == (8, 8)
    assert (config.sampler.max_response_tokens, config.lora.r, config.lora.lora_alpha) == (16, 16, 32)
    assert (config.train.learning_rate, config.train.steps, config.model.dtype) == (3e-4, 30, "bfloat16")


@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_of_a_readme_load(name, model, monkeypatch):
    """Load every ``megarl train`` line, with the model put in."""
    monkeypatch.chdir(EXAMPLES.parent)
    text = (EXAMPLES / name / "README.md").read_text()
    commands = re.findall(r"^    megarl train (.+)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        recipe, *overrides = (word.strip("'") for word in command.split())
        overrides = [f"model.path={model}" if word.startswith("model.path=") else word for word in overrides]
        config = load_config(recipe, overrides)
        assert isinstance(config, RunConfig)
        build_task(TaskContext(config.task, Path(recipe).parent, 0))


def test_the_reward_in_the_arithmetic_readme_works(tmp_path):
    code = re.search(r"```python\n(.+?)```", (EXAMPLES / "arithmetic" / "README.md").read_text(), re.DOTALL)
    (tmp_path / "reward.py").write_text(code[1])
    task = make(tmp_path, name="arithmetic", reward="reward.py:score")
    prompt = task[0]
    assert [task.reward(prompt, f"It is {prompt.data['answer'] + i}.").score for i in (0, 1)] == [1.0, 0.0]
    assert task.reward(prompt, "no number").score == 0.0
