# SPDX-License-Identifier: Apache-2.0
"""Run every example of docs/extending.md as a user would: files beside a recipe, settings from its YAML."""

import ast
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.checkpoint_engine.base import Link, load_transport
from megarl.checkpoint_engine.buckets.stream import Inbox, Outbox, plan_of
from megarl.checkpoint_engine.wire import Book
from megarl.config import CheckpointEngineConfig, LossConfig, TaskConfig
from megarl.config.sections.eval import Sampling
from megarl.controller.rollouts.data import EncodedPrompt
from megarl.controller.rollouts.playing.episode_process import EpisodeProcess
from megarl.controller.rollouts.rewarding.rewards import RewardProcess
from megarl.controller.trackers.base import TrackedRun
from megarl.controller.trackers.feeds import Feeds
from megarl.families import FAMILIES, add_family
from megarl.loss import build_loss
from megarl.loss.advantages import build_advantages
from megarl.model.weights.full_config import names_of
from megarl.tasks import TaskContext, build_task
from megarl.tasks.base import is_environment
from megarl.types import Completion, DecodedCompletion, Prompt
from tests.helpers.scripted import Policy
from tests.unit.loss.cases import make_case

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
SPEC = re.compile(r"([\w/]+\.py):(\w+)")


@dataclass
class Example:
    """One line of settings and the Python blocks that follow it."""

    heading: str
    settings: dict[str, Any]
    blocks: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return yaml.safe_dump(self.settings)

    def variants(self) -> Iterator[dict[str, Any]]:
        """Yield the settings, and those with the last name of each further block in place of the first's."""
        yield self.settings
        for block in self.blocks[1:]:
            name = [node.name for node in ast.parse(block).body if isinstance(node, ast.ClassDef | ast.FunctionDef)][-1]
            yield yaml.safe_load(SPEC.sub(rf"\1:{name}", self.text))


def examples(page: str) -> list[Example]:
    """Return the page's examples. Every indented block is YAML; every fenced one is Python of the file it names."""
    found: list[Example] = []
    heading, code = "", None
    for line in page.splitlines():
        if code is not None:
            if line == "```":
                assert found and found[-1].heading == heading, f"Python without settings under '{heading}'"
                found[-1].blocks.append("\n".join(code) + "\n")
                code = None
            else:
                code.append(line)
        elif line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("```"):
            assert line == "```python", f"under '{heading}': {line}"
            code = []
        elif line.startswith("    "):
            found.append(Example(heading, yaml.safe_load(line)))
    return found


EXAMPLES = examples(PAGE.read_text())


def run_task(settings: dict[str, Any], folder: Path) -> None:
    """Build the task and score a right completion and a wrong one in the process that scores those of a run."""
    context = TaskContext(TaskConfig(**settings), folder, 0)
    task = build_task(context)
    prompt = task[0]
    right = str(next(iter(prompt.data.values())))
    if is_environment(task):
        run_environment(context, prompt, right, folder)
        return
    ids = np.array([1, 2, 3])
    answers = [DecodedCompletion(right, "stop", ids), DecodedCompletion("nothing of it", "length", ids)]
    process = RewardProcess(context, folder / "rewards.log")
    try:
        process.dry_run(prompt, [1, 2, 3], 8)
        good, bad = process.score([(prompt, answers)])
    finally:
        process.close()
    assert good.score > bad.score, (good, bad)
    for name in settings.get("reward_weights", {}):
        assert name in good.metrics


def run_environment(context: TaskContext, prompt: Prompt, right: str, folder: Path) -> None:
    """Play episodes in the process that plays those of a run: against a policy that is right, and one that is not."""
    make_tokenizer(folder)
    policy = Policy(folder, [])

    def ask(text: str, ids: np.ndarray, seed: int, sampling: Sampling) -> Future:
        drawn = policy.encode(text + "<|end|>")
        future: Future = Future()
        future.set_result(Completion(ids, drawn, np.zeros(len(drawn), np.float32), np.zeros_like(drawn), "stop"))
        return future

    process = EpisodeProcess(context, folder / "rewards.log", str(folder))
    try:
        encoded = EncodedPrompt(prompt, policy.encode("<|user|>q<|end|><|assistant|>"))
        process.dry_run(encoded, policy.encode("plain<|end|>").tolist())
        asks = [partial(ask, right), partial(ask, "nothing of it")]
        [[good], [bad]] = process.play([encoded] * 2, asks, [0, 0], Sampling(1, 1.0, 1.0, 500))
    finally:
        process.close()
    assert good.reward.score > bad.reward.score
    assert good.trajectory.turns == 1 <= bad.trajectory.turns


def run_loss(settings: dict[str, Any], folder: Path) -> None:
    """Give the advantages of a group, or the loss of a small batch with a gradient for every token."""
    config = LossConfig(**settings)
    rewards = np.array([0.0, 1.0, 0.5])
    advantages = build_advantages(config)(rewards)
    assert np.argmax(advantages) == 1 and np.argmin(advantages) == 0
    case = make_case()
    logprobs_T = case.logprobs_T.clone().requires_grad_()
    build_loss(config)(logprobs_T, case.tokens).loss.backward()
    assert logprobs_T.grad is not None and torch.isfinite(logprobs_T.grad).all() and (logprobs_T.grad != 0).any()


def run_transport(settings: dict[str, Any], folder: Path) -> None:
    """Send tensors to two receivers."""
    transport = load_transport(CheckpointEngineConfig(**settings).transport)
    weights = [("a", torch.randn(37, 5)), ("b", torch.randn(3000).bfloat16()), ("none", torch.empty(0, 4))]
    sender = transport.open_sender(Link(2, 20.0))

    def receive(index: int) -> dict[str, torch.Tensor]:
        receiver = transport.open_receiver(sender.endpoint(), index)
        inbox = Inbox(receiver, index, Book())
        tensors = {name: tensor.clone() for name, tensor in inbox.tensors()}
        inbox.finish()
        receiver.close()
        return tensors

    with ThreadPoolExecutor(2) as pool:
        arrived = [pool.submit(receive, index) for index in range(2)]
        Outbox(sender, 4096).send(iter(weights), 1, "adapter", plan_of(weights, {}, 4096))
        for future in arrived:
            assert all(torch.equal(future.result()[name], tensor) for name, tensor in weights)
    sender.close()


def run_family(settings: dict[str, Any], folder: Path) -> None:
    """Read a config.json whose model_type only this family knows, and map its weights' names."""
    family = add_family(settings["family"])
    assert family is not None
    try:
        sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
        names = names_of({"model_type": family.model_types[0], "intermediate_size": 48} | sizes)
        assert len(names.linear_names()) == 2 * 7 and "model.layers.1.mlp.up_proj" in names.linear_names()
    finally:
        for name in family.model_types:
            del FAMILIES[name]


def run_trackers(settings: dict[str, Any], folder: Path) -> None:
    """Send a run of two steps to the trackers."""
    said: list[str] = []
    feeds = Feeds(settings["trackers"], said.append)
    feeds.open(TrackedRun(folder, "run", "megarl", {"lora.r": 8}))
    for step in (1, 2):
        feeds.log({"step": step, "reward": step / 4})
    feeds.finish({"reward_last": 0.5})
    lines = (folder / "lines.txt").read_text().splitlines()
    assert lines == [
        'run after step 0: {"lora.r": 8}',
        "step 1: reward 0.25",
        "step 2: reward 0.5",
        '{"reward_last": 0.5}',
    ]
    assert not said and list((folder / "tensorboard").iterdir())


RUN: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "task": run_task,
    "loss": run_loss,
    "checkpoint_engine": run_transport,
    "model": run_family,
    "train": run_trackers,
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.heading.replace(" ", "-"))
def test_the_example_works(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.chdir(tmp_path)
    rows = [{"question": "What is 6 * 7?", "answer": "6 * 7 = 42\n#### 42"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "train.jsonl").write_text('{"question": "What is 6 * 7?", "answer": "42"}\n')
    if example.blocks:
        [(file, _)] = SPEC.findall(example.text)
        (tmp_path / file).write_text("\n\n".join(example.blocks))
    [section] = example.settings
    for variant in example.variants():
        RUN[section](variant[section], tmp_path)


def test_no_example_of_the_page_is_left_out() -> None:
    page = PAGE.read_text()
    assert page.count("```python\n") == sum(len(example.blocks) for example in EXAMPLES) > 5
    for spec in SPEC.findall("\n".join(example.text for example in EXAMPLES)):
        assert spec[0] != "file.py"
    for example in EXAMPLES:
        assert bool(SPEC.search(example.text)) == bool(example.blocks), f"under '{example.heading}': file without text"


def test_a_broken_example_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loss.py").write_text("def nothing(config):\n    return lambda logprobs_T, tokens: None\n")
    with pytest.raises(AttributeError, match="loss"):
        run_loss({"name": "loss.py:nothing"}, tmp_path)
