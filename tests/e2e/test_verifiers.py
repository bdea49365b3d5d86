# SPDX-License-Identifier: Apache-2.0
"""Train on an environment of verifiers with a real engine: its rewards, and exactly the engine's tokens.

Needs verifiers in a virtual environment of its own, see tests/unit/environments/test_verifiers.py.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.sampled import check_sampled
from tests.helpers.train_run import TrainRun, make_recipe, read_rollout, read_rows

VENV = os.environ.get("VERIFIERS_VENV")
pytestmark = pytest.mark.skipif(VENV is None, reason="VERIFIERS_VENV names no environment with verifiers")
STEPS = 3
SETTINGS = (
    f"train.steps={STEPS}",
    "train.eval_every=null",
    "task.name=verifiers",
    "task.reward=null",
    "task.held_out=0",
    "task.max_turns=3",
    "task.max_turn_tokens=12",
    "sampler.max_response_tokens=90",
    "eval.tasks=[]",
    "loss.importance_cap=2.0",
)
# A random model never answers correctly, so any reward that differs between episodes is used.
ENVIRONMENT = """
import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.125)
    async def lower(self, trace: vf.Trace) -> float:
        return sum(letter.islower() for one in trace.assistant_messages for letter in one.content or "")

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class Taskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(vf.TaskData(prompt=f"Say {row}."), self.config.task) for row in range(20)]


class Harness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        said = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as policy:
            for stop in (["a", "E", "7"], None):
                events = await policy.chat.completions.create(model=ctx.model, messages=said, stream=True, stop=stop)
                text = "".join([event.choices[0].delta.content or "" async for event in events if event.choices])
                said += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
        return ProgramResult(0, "", "")


__all__ = ["Taskset", "Harness"]
"""


def test_a_run_trains_on_what_the_endpoint_recorded(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, "qwen3", tied=True)
    (tmp_path / "lower_case.py").write_text(ENVIRONMENT)
    options = f"task.options={{python: {VENV}, id: lower-case, folder: .}}"
    run = TrainRun(recipe, f"train.output={tmp_path / 'runs'}", *SETTINGS, options)
    try:
        run.wait_for(f"step {STEPS} ", timeout=400)
        assert run.finish(60) == 0, run.output()
    finally:
        run.kill()
    check_sampled(run.folder(), recipe)
    for row in read_rows(run.folder()):
        assert row["episode_turns"] == row["task/turns"] == 2.0 and row["failed_rewards"] == 0
        assert row["reward"] == pytest.approx(row["task/lower"] / 8)
    rows = [one for step in range(1, STEPS + 1) for one in read_rollout(run.folder(), step)]
    assert len(rows) == STEPS * 2 * 4 and all(len(row["drawn"]) == 2 for row in rows)
    assert {row["messages"][0]["content"] for row in rows} <= {f"Say {number}." for number in range(20)}
    assert np.ptp([row["reward"] for row in rows]) > 0
