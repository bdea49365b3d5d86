# SPDX-License-Identifier: Apache-2.0
"""Load the user's own loss, task and transport by ``file.py:Name``."""

import json

import numpy as np
import pytest
import torch

from megarl.checkpoint_engine.base import Link, open_receiver, open_sender
from megarl.config import LossConfig, parse_config
from megarl.errors import ConfigError
from megarl.launch.names import with_absolute_paths
from megarl.loss import LOSSES, TokenBatch, build_loss
from megarl.plugins import load_object, pick_or_load
from megarl.tasks import TaskContext, build_task

OWN = """
from dataclasses import dataclass

from megarl.config import LossConfig
from megarl.loss import LossOutput
from megarl.tasks import Reward
from megarl.types import Prompt


@dataclass(frozen=True)
class Scaled:
    config: LossConfig

    def __call__(self, logprobs_T, tokens):
        loss = -(tokens.weights_T * tokens.advantages_T * logprobs_T).sum() * self.config.options["scale"]
        return LossOutput(loss, {})


class Echo:
    def __init__(self, context):
        self.words = context.config.options["words"]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return Prompt(id=f"echo-{index}", messages=({"role": "user", "content": self.words[index]},), data={})

    def reward(self, prompt, response):
        return Reward(float(response == prompt.messages[0]["content"]))


class Memory:
    \"\"\"A transport within one process.\"\"\"

    frames = []

    @staticmethod
    def open_sender(link):
        return "sender"

    @staticmethod
    def open_receiver(endpoint, index):
        return f"receiver {index}"
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def test_a_loss_of_a_file_computes_with_its_options(folder):
    loss = build_loss(LossConfig(name=f"{folder}/own.py:Scaled", options={"scale": 3.0}))
    tokens = TokenBatch(torch.tensor([0.5, 0.5]), torch.tensor([1.0, -2.0]), 0.5)
    assert loss(torch.tensor([-1.0, -4.0]), tokens).loss == pytest.approx(3.0 * (0.5 - 4.0))


def test_a_task_of_a_file_gives_prompts_and_rewards(folder):
    tree = {"model": {"path": str(folder)}, "task": {"name": "own.py:Echo", "options": {"words": ["a", "b"]}}}
    config = with_absolute_paths(parse_config(tree), folder)
    assert config.task.name == f"{folder}/own.py:Echo"
    task = build_task(TaskContext(config.task, folder, 0))
    assert [task.reward(task[1], answer).score for answer in ("b", "c")] == [1.0, 0.0]


def test_a_transport_of_a_file_opens_both_halves(folder):
    name = f"{folder}/own.py:Memory"
    assert open_sender(name, Link(1, 1.0)) == "sender"
    assert open_receiver(json.loads(json.dumps({"transport": name})), 2) == "receiver 2"


def test_a_name_may_be_in_an_installed_package():
    assert load_object("numpy:float32", "loss.name") is np.float32


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("own.py:Scald", "has no 'Scald'; did you mean 'Scaled'"),
        ("none.py:Scaled", "there is no file"),
        ("own.py:", "must have the form file.py:Name or package.module:Name"),
        ("no_such_package:Name", "no_such_package cannot be imported: ModuleNotFoundError"),
        ("broken.py:Name", "broken.py cannot be imported: ZeroDivisionError"),
        ("grpoo", r"unknown loss 'grpoo'; did you mean 'grpo'\? \(known: cispo, grpo, gspo\)"),
    ],
)
def test_what_cannot_be_loaded_is_named(folder, spec, message):
    (folder / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=message):
        pick_or_load(LOSSES, spec, "loss", "loss.name", folder)
