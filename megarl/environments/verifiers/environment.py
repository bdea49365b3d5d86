# SPDX-License-Identifier: Apache-2.0
"""Task ``verifiers``: environments of the package of that name, which talk to the policy through OpenAI's API."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from megarl.config.base import Section
from megarl.environments.client import Client
from megarl.environments.openai_endpoint import Gateway
from megarl.environments.openai_server import Address
from megarl.environments.verifiers.process import Place, Runner
from megarl.errors import ConfigError, EpisodeError
from megarl.tasks.base import Reward, TaskContext
from megarl.tasks.options import absolute_path, parse_options, refuse_path
from megarl.types import Prompt, Trajectory

# Stop conditions of verifiers that are limits here.
LIMITS = {"max_turns": "turns"} | dict.fromkeys(("max_input_tokens", "max_output_tokens", "max_total_tokens"), "length")


class VerifiersOptions(Section):
    python: str
    """Interpreter that has the package verifiers: its path, or the folder of its virtual environment; relative to the
    recipe. Its packages may be others than megarl's."""
    id: str
    """Id of the taskset: a module that is installed there, or that comes with verifiers."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the taskset."""
    env: dict[str, Any] = Field(default_factory=dict)
    """The rest of verifiers' own ``[env]`` configuration (``{agent: {harness: {id: bash}, runtime: {type: docker}}}``).
    ``max_turns`` of the agent is ``task.max_turns`` if it is not set."""
    folder: str | None = None
    """Folder with modules that are not installed, relative to the recipe."""
    size: int | None = Field(None, ge=1, le=10_000_000)
    """Number of rows that are taken, from the first on. Default: all."""
    start_seconds: float = Field(300.0, gt=0.0)
    """Limit of starting the interpreter and loading the environment, seconds."""


class VerifiersEnvironment:
    """Prompt ``i`` is row ``i`` of a taskset.

    Its episodes are played by verifiers, in a process that is started for the first of them. Token ids, logprobs and
    versions are those that the endpoint recorded.
    """

    def __init__(self, place: Place, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """
        Args:
            place: how the process is started.
            name: of the taskset.
            rows: of the taskset; see ``Place.rows``.
        """
        self._place, self._name, self._rows = place, name, rows
        self._gateway, self._address = Gateway(), Address("", "")
        self._runner: Runner | None = None
        self._starting = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        row = self._rows[index]
        messages = row["messages"] or [{"role": "user", "content": ""}]  # the harness opens the conversation
        return Prompt(f"{self._name}-{index}", tuple(messages), {"row": index, "key": row["key"], **row["data"]})

    async def rollout(self, prompt: Prompt, client: Client) -> Trajectory:
        """Let verifiers play an episode.

        The reward is the weighted sum of its rewards. Metrics: its own, and each reward.

        Raises:
            EpisodeError: verifiers recorded an error, or its process has ended.
        """
        runner = await self._started()
        with self._gateway.session(client) as model:
            frame = {"row": prompt.data["row"], "key": prompt.data["key"], "model": model}
            result = await runner.play(frame | {"base_url": self._address.base_url})
        if result["errors"]:
            raise EpisodeError(f"verifiers: {'; '.join(result['errors'])}")
        trajectory = client.trajectory(Reward(result["reward"], result["metrics"]))
        reason = "time" if result["timeout"] else LIMITS.get(result["stop"])
        return trajectory if reason is None else replace(trajectory, finish_reason=reason)

    async def _started(self) -> Runner:
        """Return the process, and start it if there is none."""
        async with self._starting:
            if self._runner is not None and self._runner.ended:
                failure, self._runner = self._runner.failure, None
                if failure is not None:
                    raise failure
            if self._runner is None:
                if not self._address.base_url:
                    self._address = await self._gateway.start()
                self._runner = await asyncio.to_thread(self._start)
                await self._runner.open()
            return self._runner

    def _start(self) -> Runner:
        process, link = self._place.start(self._address.api_key)
        try:
            self._place.read_rows(link)
        except (OSError, EOFError) as error:
            process.kill()
            process.wait()
            raise EpisodeError(f"the process of verifiers did not start: {type(error).__name__}") from error
        return Runner(process, link)


def build(context: TaskContext) -> VerifiersEnvironment:
    """Make the environment from ``task.options``; a process reads its rows.

    Raises:
        ConfigError: wrong options, ``task.path`` is set, the interpreter does not exist or has no verifiers, or the
            environment cannot be loaded.
    """
    refuse_path(context)
    options = parse_options(context, VerifiersOptions)
    env = options.env | {"taskset": options.args | {"id": options.id}}
    if "taskset" in options.env:
        raise ConfigError("task.options.env holds 'taskset'; set task.options.id and task.options.args instead")
    folder = options.folder and absolute_path("task.options.folder", options.folder, context.recipe_dir)
    place = Place(
        _interpreter(options.python, context.recipe_dir),
        folder or None,
        env,
        context.config.max_turns,
        options.size,
        options.start_seconds,
    )
    return VerifiersEnvironment(place, options.id.rpartition("/")[2], place.rows())


def _interpreter(given: str, recipe_dir: Path) -> Path:
    """Return the interpreter that a path names, itself or as the folder of its virtual environment."""
    path = absolute_path("task.options.python", given, recipe_dir)
    inner = path / "bin" / "python"
    if path.is_dir() and not inner.is_file():
        raise ConfigError(f"task.options.python is '{given}', a folder without bin/python; name an interpreter")
    return inner if path.is_dir() else path
