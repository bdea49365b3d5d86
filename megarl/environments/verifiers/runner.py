# SPDX-License-Identifier: Apache-2.0
"""Play environments of verifiers (0.4) for megarl. Runs by its path, in another Python, and imports nothing of megarl.

    python -P runner.py DESCRIPTOR

DESCRIPTOR is a socket. A frame on it is 8 bytes, the length of what follows (big endian), and JSON. megarl begins with
``env`` (verifiers' own configuration), ``turns`` and ``size``; the answer has ``rows`` or ``error``. Then come
``{"play": NUMBER, "row": ..., "key": ..., "model": ..., "base_url": ...}``, answered by ``{"played": NUMBER, ...}`` in
any order, and ``{"cancel": NUMBER}``, answered by ``{"played": NUMBER}`` too. It ends when the socket is closed.
"""

import asyncio
import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

KEY = "MEGARL_API_KEY"  # verifiers reads the endpoint's token there, and hides names like it from programs
UNKEPT = {"idx", "prompt", "system_prompt"}


class Runner:
    """An environment, and the episodes that are played in it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._playing: dict[int, asyncio.Task] = {}

    async def run(self) -> None:
        """Load the environment, say what its rows are, and play until the socket is closed."""
        first = await self._read()
        try:
            self._load(first["env"], first["turns"], first["size"])
            rows = [row_of(task) for task in self._tasks]
        except BaseException as error:
            self._send({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
            await self._writer.drain()
            return
        self._send({"rows": rows})
        await self._writer.drain()
        try:
            frame = await self._read()
        except asyncio.IncompleteReadError:
            return
        async with self._env.serving():
            while True:
                self._take(frame)
                try:
                    frame = await self._read()
                except asyncio.IncompleteReadError:
                    return

    def _load(self, env: dict[str, Any], turns: int, size: int | None) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.runtimes import PrimeConfig
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        config = resolve_env_config(env)
        seats = agent_config_fields(config)
        if len(seats) != 1:
            raise ValueError(f"the environment has the agents {', '.join(seats)}; megarl trains environments of one")
        [(name, seat)] = seats.items()
        if config.retries.max_retries or seat.retries.max_retries:
            raise ValueError("retries would train on what was drawn in failed attempts; set max_retries to 0")
        given = dict(env.get(name) or {})
        if "runtime" not in given and isinstance(seat.runtime, PrimeConfig):  # verifiers' default, a remote sandbox
            given["runtime"] = runtime_of(config, name)
        if seat.max_turns is None:
            given["max_turns"] = turns
        self._env = load_environment(resolve_env_config(env | {name: given}))
        if not self._env.taskset.bounded and size is None:
            raise ValueError("the taskset is infinite; set size, the number of rows that are taken")
        self._tasks = list(itertools.islice(self._env.taskset, size))

    def _take(self, frame: dict[str, Any]) -> None:
        if "cancel" in frame:
            if task := self._playing.get(frame["cancel"]):
                task.cancel()
            return
        number = frame["play"]
        self._playing[number] = asyncio.ensure_future(self._play(number, frame))
        self._playing[number].add_done_callback(lambda _: self._playing.pop(number))

    async def _play(self, number: int, frame: dict[str, Any]) -> None:
        result: dict[str, Any] = {}
        try:
            result = await self._episode(frame)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            traceback.print_exc()
            result = {"errors": [f"{type(error).__name__}: {error}"]}
        self._send({"played": number, **result})

    async def _episode(self, frame: dict[str, Any]) -> dict[str, Any]:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        task = self._tasks[frame["row"]]
        if task.hash != frame["key"]:
            return {"errors": [f"row {frame['row']} is another at each start; the taskset must give the same rows"]}
        client = EvalClientConfig(base_url=frame["base_url"], api_key_var=KEY)
        episode = await self._env.run_episode(task, ModelContext(model=frame["model"], client=client))
        found = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        for error in found:
            print(error.traceback or error.message, file=sys.stderr, flush=True)
        if not found and len(episode.traces) != 1:
            return {
                "errors": [f"the episode has {len(episode.traces)} runs of its agent; megarl trains episodes of one"]
            }
        return {
            "errors": [f"{error.type}: {error.message}" for error in found],
            "timeout": episode.is_timeout or any(trace.is_timeout for trace in episode.traces),
            **(result_of(episode.traces[0]) if episode.traces else {}),
        }

    def _send(self, frame: dict[str, Any]) -> None:
        body = json.dumps(frame).encode()
        self._writer.write(len(body).to_bytes(8, "big") + body)

    async def _read(self) -> dict[str, Any]:
        length = int.from_bytes(await self._reader.readexactly(8), "big")
        return json.loads(await self._reader.readexactly(length))


def runtime_of(config: Any, name: str) -> dict[str, Any]:
    """Return the runtime of an agent that names none: this host, if its program runs no code of the policy.

    Raises:
        ValueError: the program runs what the policy says, and no runtime is named.
    """
    from verifiers.v1.utils.loaders import load_harness

    harness = load_harness(config.agent_harnesses()[name])
    if harness.EXECUTES_CODE:
        raise ValueError(
            f"the harness '{harness.config.id}' runs commands of the policy, and env.{name}.runtime is not set; set "
            "it to {type: docker}, say, or to {type: subprocess} to run them on this host; or take one that runs none "
            f"(env.{name}.harness: {{id: 'null'}})"
        )
    return {"type": "subprocess"}


def row_of(task: Any) -> dict[str, Any]:
    """Return what is shown of a task: its first messages, data and key."""
    from verifiers.v1.dialects.chat import message_to_wire

    data = task.data
    said = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else []
    if isinstance(data.prompt, list):
        said = [message_to_wire(message) for message in data.prompt]
    if data.system_prompt is not None:
        said.insert(0, {"role": "system", "content": data.system_prompt})
    for message in said:
        if isinstance(message["content"], list):
            if any(part.get("type") != "text" for part in message["content"]):
                raise ValueError(f"the prompt of row {data.idx} holds more than text, which megarl does not train on")
            message["content"] = "".join(part["text"] for part in message["content"])
    kept = data.model_dump(mode="json", exclude_defaults=True, exclude=UNKEPT)
    return {"messages": said, "data": kept, "key": task.hash}


def result_of(trace: Any) -> dict[str, Any]:
    """Return what an agent's run has earned."""
    rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {"reward": trace.reward, "metrics": metrics | rewards, "stop": trace.stop_condition}


def _end_with_parent(parent: int) -> None:
    """End this process when its parent is gone, even in the middle of an environment's code."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


async def main(descriptor: int) -> None:
    """Serve a socket until it is closed."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=2**30)
    await Runner(reader, writer).run()


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    asyncio.run(main(int(sys.argv[1])))
