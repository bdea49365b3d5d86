# SPDX-License-Identifier: Apache-2.0
"""Test environments of verifiers: what cannot be started is named; episodes are exactly what the endpoint recorded.

The second half needs verifiers, in a virtual environment of its own, and is skipped without:

    python3 -m venv VENV && VENV/bin/pip install -r requirements/verifiers.txt
    VERIFIERS_VENV=VENV python -m pytest tests/unit/environments/test_verifiers.py
"""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.config import TaskConfig
from megarl.environments.episode import Player
from megarl.environments.verifiers import process
from megarl.errors import ConfigError, EpisodeError, RewardError
from megarl.tasks import TaskContext, build_task
from megarl.tasks.options import absolute_files
from megarl.tasks.rewards.verdicts import Verdicts
from tests.helpers.scripted import Policy
from tests.helpers.tokenizer import CALLING

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "verifiers"
VENV = os.environ.get("VERIFIERS_VENV")
needs_verifiers = pytest.mark.skipif(VENV is None, reason="VERIFIERS_VENV names no environment with verifiers")

PLOTS = """
import os, time
import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def given(self, trace: vf.Trace) -> float:
        if self.data.name == "reward_raises":
            raise ValueError("no judge")
        return float("nan") if self.data.name == "reward_is_nan" else 0.25


class Taskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for name in ("good", "reward_raises", "reward_is_nan", "harness_raises", "exits", "blocks", "talks", "waits"):
            data = vf.TaskData(name=name, prompt=[vf.UserMessage(content=name)], system_prompt="Be brief.")
            yield Task(data, self.config.task)


class Harness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        print("a line on standard output")
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as policy:
            said = [{"role": "user", "content": data.name}]
            while True:
                try:
                    events = await policy.chat.completions.create(model=ctx.model, messages=said, stream=True)
                except openai.APIStatusError:
                    if trace.stop_condition:
                        break
                    raise
                text = "".join([event.choices[0].delta.content or "" async for event in events])
                said += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
                if data.name == "harness_raises":
                    raise RuntimeError("out of ideas")
                if data.name == "exits":
                    os._exit(3)
                if data.name == "blocks":
                    time.sleep(1000)
                if data.name != "talks":
                    break
        return ProgramResult(0, "", "")


__all__ = ["Taskset", "Harness"]
"""

# As verifiers' documentation has it: a server of tools, for its own chat program.
ADDER = """
import verifiers.v1 as vf


class Tools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        return a + b


class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "42")


class Taskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(vf.TaskData(prompt="40 + 2?"), self.config.task)]


if __name__ == "__main__":
    Tools.run()
__all__ = ["Taskset"]
"""


def context(folder, **options):
    given = {"python": str(VENV or sys.executable), "id": "plots", "folder": "."} | options
    settings = {name: given.pop(name) for name in ("max_turns",) if name in given}
    return TaskContext(TaskConfig(name="verifiers", options=given, **settings), Path(folder), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"python": "nowhere/bin/python"}, "task.options.python is 'nowhere/bin/python', but there is no file"),
        ({"python": "."}, "task.options.python is '.', a folder without bin/python"),
        ({"python": sys.executable}, r"No module named 'verifiers'; install it there: .* -m pip install verifiers=="),
        ({"python": "/bin/true"}, "cannot be loaded: it ended early"),
        ({"python": "/bin/sh", "start_seconds": 0.0001}, r"longer than task.options.start_seconds|it ended early"),
        ({"env": {"taskset": {"id": "other"}}}, "set task.options.id and task.options.args instead"),
        ({"name": 3}, "task.options.name"),
    ],
)
def test_what_cannot_be_started_is_named(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        build_task(context(tmp_path, **options))


def test_paths_are_absolute_in_a_runs_config_and_links_stay(tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    options = absolute_files(context(tmp_path, python="python")).options
    assert options == {"python": f"{tmp_path}/python", "id": "plots", "folder": str(tmp_path)}


def test_the_pin_is_what_the_message_says():
    [pin] = re.findall(r"^verifiers==\S+$", (ROOT / "requirements" / "verifiers.txt").read_text(), re.MULTILINE)
    assert pin in Path(process.__file__).read_text()


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("plots")
    (path / "plots.py").write_text(PLOTS)
    make_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def plots(folder):
    return build_task(context(folder, max_turns=3))


async def play(environment, row, client, zero=False):
    prompt = environment[row]
    return await Player(environment, "verifiers", Verdicts("environment", {}), zero).play(prompt, client)


@needs_verifiers
def test_the_example_is_played_and_recorded_token_by_token(loop, folder):
    environment = build_task(context(EXAMPLE, id="alphabet", args={"rows": 4}))
    policies = [Policy(folder, ["zz", environment[row].data["answer"]]) for row in range(4)]
    clients = [policy.client(tokens=400) for policy in policies]

    async def all_rows():
        return await asyncio.gather(*(play(environment, row, client) for row, client in enumerate(clients)))

    assert len(environment) == 4 and len({environment[row].id for row in range(4)}) == 4
    for row, played in enumerate(loop.run(all_rows())):
        [sequence] = played.trajectory.sequences
        answer = environment[row].data["answer"]
        after = chr((ord(answer) - ord("A") + 1) % 26 + ord("A"))
        assert played.texts == [f"zz<|end|><|user|>No. It comes before {after}.<|end|><|assistant|>{answer}<|end|>"]
        assert sequence.logprobs.tolist() == [-1, -2, -3, -1, -2] and sequence.versions.tolist() == [0, 0, 0, 1, 1]
        asked = policies[row].tokenizer.apply_chat_template(
            list(environment[row].messages), add_generation_prompt=True, return_dict=False
        )
        assert sequence.prompt_ids.tolist() == asked
        assert (played.reward.score, dict(played.reward.metrics)) == (0.6, {"found": 0.5, "brief": 1.0, "correct": 1.0})
        assert played.trajectory.finish_reason == "stop" and played.trajectory.turns == 2


@needs_verifiers
def test_verifiers_own_program_calls_tools_through_the_endpoint(loop, folder):
    (folder / "adder.py").write_text(ADDER)
    environment = build_task(context(folder, id="adder", env={"agent": {"harness": {"id": "null"}}}))
    call = '<call>{"name": "tools_add", "arguments": {"a": 40, "b": 2}}</call>'
    client = Policy(folder, [call, "42"]).client(
        template={"chat_template": CALLING}, tokens=2000, turn_tokens=200, seconds=300.0
    )
    try:
        played = loop.run(play(environment, 0, client))
    except EpisodeError as error:
        if "failed to prepare uv script" in str(error):
            pytest.skip("the program's packages cannot be installed here")
        raise
    assert played.reward.score == 1.0
    assert played.texts == [f"{call}<|end|><|tool|>42<|end|><|assistant|>42<|end|>"]


@needs_verifiers
def test_rows_have_the_system_prompt_and_an_episode_its_limits(loop, folder, plots):
    assert [message["role"] for message in plots[0].messages] == ["system", "user"]
    good = loop.run(play(plots, 0, Policy(folder, ["ab"]).client()))
    assert good.reward.score == 0.25 and good.trajectory.turns == 1
    # verifiers counts to task.max_turns itself, and scores what it ends.
    ended = loop.run(play(plots, 6, Policy(folder, ["ab"]).client()))
    assert (ended.trajectory.finish_reason, ended.reward.score, ended.trajectory.turns) == ("turns", 0.25, 3)
    # A limit of tokens is the endpoint's.
    cut = loop.run(play(plots, 6, Policy(folder, ["ab"]).client(tokens=8)))
    assert (cut.trajectory.finish_reason, cut.reward.score) == ("length", 0.0)


@needs_verifiers
@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        (1, EpisodeError, "environment 'verifiers', prompt 'plots-1': verifiers: TaskError: .*ValueError: no judge"),
        (2, RewardError, "nan"),
        (3, EpisodeError, "prompt 'plots-3': verifiers: HarnessError: .*out of ideas"),
        (4, EpisodeError, "prompt 'plots-4': the process of verifiers ended with status 3"),
    ],
)
def test_an_error_of_the_environment_is_named_or_a_counted_zero(loop, folder, plots, row, kind, message):
    with pytest.raises(kind, match=message):
        loop.run(play(plots, row, Policy(folder, ["ab"]).client()))
    played = loop.run(play(plots, row, Policy(folder, ["ab"]).client(), zero=True))
    assert played.trajectory.finish_reason == "error" and played.reward.score == 0.0
    # The next episode is played, after a process that ended by another one.
    assert loop.run(play(plots, 0, Policy(folder, ["ab"]).client())).reward.score == 0.25


@needs_verifiers
def test_code_that_keeps_the_process_busy_is_killed_and_named(loop, folder, plots, monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.5)
    loop.run(play(plots, 0, Policy(folder, ["ab"]).client()))
    played = loop.run(play(plots, 5, Policy(folder, ["ab"]).client(seconds=1.0)))
    assert played.trajectory.finish_reason == "time"
    loop.run(asyncio.sleep(1.0))
    with pytest.raises(EpisodeError, match="kept its process busy"):
        loop.run(play(plots, 0, Policy(folder, ["ab"]).client()))
    assert loop.run(play(plots, 0, Policy(folder, ["ab"]).client())).reward.score == 0.25


@needs_verifiers
def test_a_runtime_that_is_named_is_kept(loop, folder):
    runtime = {"env": {"agent": {"runtime": {"type": "docker"}, "max_turns": 1}}}
    environment = build_task(context(folder, **runtime))
    with pytest.raises(EpisodeError, match=r"(?i)docker"):
        loop.run(play(environment, 0, Policy(folder, ["ab"]).client()))
    assert len(build_task(context(folder, env={"agent": {"harness": {"id": "bash"}} | runtime["env"]["agent"]}))) == 8


@needs_verifiers
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "nothing"}, "taskset 'nothing' not found"),
        ({"args": {"rows": 3}}, "rows"),
        (
            {"env": {"agent": {"harness": {"id": "bash"}}}},
            "the harness 'bash' runs commands of the policy, and env.agent",
        ),
        (
            {"env": {"agent": {"retries": {"max_retries": 1}}}},
            "retries would train on what was drawn in failed attempts",
        ),
    ],
)
def test_an_environment_that_cannot_be_trained_on_is_named(folder, options, message):
    with pytest.raises(ConfigError, match=f"(?s)cannot be loaded by .*{message}"):
        build_task(context(folder, **options))
