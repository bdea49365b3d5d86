# SPDX-License-Identifier: Apache-2.0
"""Train asynchronously on episodes with a real engine: versions within the bound, faults, every prompt once.

Every recorded token that was drawn has the logprob that Hugging Face + PEFT give it.
"""

import signal
from pathlib import Path

import numpy as np
import pytest

from megarl.config import load_config
from megarl.controller.rollouts.data import PromptStream
from megarl.tasks import TaskContext, build_task
from megarl.tasks.held_out import training_part
from tests.helpers.sampled import peft_logprobs
from tests.helpers.train_run import TrainRun, make_recipe, read_rollout, read_rows

pytestmark = pytest.mark.long

STEPS, STALENESS, PROMPTS = 10, 2, 2
SETTINGS = (
    f"train.max_staleness={STALENESS}",
    f"train.steps={STEPS}",
    f"train.prompts_per_step={PROMPTS}",
    "train.save_every=2",
    "train.hang_seconds=6",
    "train.learning_rate=1e-3",
    "loss.importance_cap=2.0",
    "checkpoint_engine.in_flight=continue",
    "sampler.max_response_tokens=90",
    "sampler.max_prompt_tokens=96",
    "train.micro_batch_tokens=256",
    "task.name=echo.py:Echo",
    "task.reward=null",
    "task.options={min: 10, max: 99}",
    "task.max_turns=3",
    "task.max_turn_tokens=32",
    "eval.tasks=[]",
)
# A random model never answers correctly, so any reward that differs between episodes is used.
ENVIRONMENT = """
import openai
from megarl.environments import Chat, EpisodeLimit, endpoint
from megarl.tasks import arithmetic


class Echo(arithmetic.ArithmeticTask):
    def __init__(self, context):
        super().__init__(arithmetic.ArithmeticOptions(**context.config.options), context.seed)

    async def rollout(self, prompt, client):
        said, play = [], self.harness if prompt.data["answer"] % 2 else self.turns
        try:
            await play(prompt, client, said)
        except (EpisodeLimit, openai.BadRequestError):  # what the endpoint makes of a limit
            return client.trajectory(sum(character.islower() for character in "".join(said)) / 8)

    async def turns(self, prompt, client, said):
        chat = Chat(client)
        while True:
            said.append((await chat.sample()).text)
            chat.add({"role": "user", "content": said[-1][-3:] + "?"})

    async def harness(self, prompt, client, said):
        messages = list(prompt.messages)
        async with endpoint(client) as (url, key), openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as to:
            while True:
                events = await to.chat.completions.create(
                    model="policy", messages=messages, stream=True, stop=["a", "E", "7"]
                )
                said.append("".join([event.choices[0].delta.content or "" async for event in events]))
                answer = {"role": "assistant", "content": said[-1]}
                messages += [answer, {"role": "user", "content": said[-1][-3:] + "?"}]
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """Return the folder of a run: a trainer rank was stopped after step 3, and the controller killed after step 5."""
    recipe = make_recipe(tmp_path_factory.mktemp("async"), "qwen3", tied=True)
    (recipe.parent / "echo.py").write_text(ENVIRONMENT)
    first = TrainRun(recipe, f"train.output={recipe.parent}", *SETTINGS)
    try:
        first.wait_for("step 3 ", timeout=420)
        first.find_rank("TrainerRank.forward_backward").suspend()
        first.wait_for("all ranks start again (1 of at most 3, train.max_restarts)", timeout=60)
        # Version 2, or 4 if the rank was stopped after the next checkpoint.
        first.wait_for(", verified, and goes on", timeout=120)
        first.wait_for("step 5 ", timeout=60)
        first.process.send_signal(signal.SIGKILL)
        first.finish(60)
    finally:
        first.kill()
    [folder] = {path.parent for path in recipe.parent.glob("*/metrics.jsonl")}
    second = TrainRun(recipe, *SETTINGS, f"train.resume={folder}")
    try:
        second.wait_for(f"step {STEPS} ", timeout=420)
        assert second.finish(60) == 0, second.output()
        assert second.folder() == folder
    finally:
        second.kill()
    return folder


def test_tokens_are_of_several_versions_within_the_bound(run_folder: Path) -> None:
    rows = read_rows(run_folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert 0 < max(row["staleness_max"] for row in rows) <= STALENESS
    for row in rows:
        for one in read_rollout(run_folder, row["step"]):
            assert row["version"] - 1 - STALENESS <= one["version"] <= one["last_version"] <= row["version"] - 1
    # A row has the canary of the version before its update; a session's first row may have none.
    canaries = [row["canary"] for row in rows if "canary" in row]
    assert len(canaries) >= STEPS // 2 and max(canaries) < 1e-5


def test_no_prompt_is_lost_or_trained_twice_across_the_kills(run_folder: Path) -> None:
    prompts = [{one["prompt"] for one in read_rollout(run_folder, step)} for step in range(1, STEPS + 1)]
    assert [len(step) for step in prompts] == [PROMPTS] * STEPS
    assert set().union(*prompts) == first_prompts(run_folder, PROMPTS * STEPS)


def test_what_was_drawn_has_pefts_logprobs_and_only_that_is_marked(run_folder: Path) -> None:
    checked = 0
    for step in range(2, STEPS + 1):
        rows = [one for one in read_rollout(run_folder, step) if one["version"] == one["last_version"]]
        assert all(row["finish_reason"] in ("turns", "length") for row in rows)
        for version in {row["version"] for row in rows if row["version"] % 2 == 0 and row["version"]}:
            made = [row for row in rows if row["version"] == version]
            adapter = run_folder / "checkpoints" / f"step-{version:06d}" / "adapter"
            sampled = np.concatenate([row["logprobs"] for row in made])
            assert np.abs(peft_logprobs(run_folder.parent / "recipe.yaml", adapter, made) - sampled).max() <= 1e-4
            checked += sum(len(row["drawn"]) > 1 for row in made)
    assert checked > 0, "no episode of several turns was drawn by one version"
    assert all(row["episode_turns"] > 1 for row in read_rows(run_folder))


def first_prompts(run_folder: Path, count: int) -> set[str]:
    """Return the ids of the first prompts of the run's stream."""
    config = load_config(run_folder / "config.yaml")
    task = build_task(TaskContext(config.task, run_folder, config.train.seed))
    training = training_part(task, config.task.held_out)
    stream = PromptStream(training, lambda prompt: np.zeros(1, dtype=np.int64), config.train.seed)
    return {prompt.prompt.id for prompt in stream.next(count)}
