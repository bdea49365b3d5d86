# SPDX-License-Identifier: Apache-2.0
"""Environment ``calculator``: sums that are too long to do in one's head, and a calculator that the policy may use."""

import re
from typing import ClassVar

from megarl.environments.chat import Chat
from megarl.environments.client import Client, EpisodeLimit
from megarl.tasks.answers.expression import evaluate
from megarl.tasks.arithmetic import ArithmeticOptions, ArithmeticTask
from megarl.tasks.base import Reward, TaskContext
from megarl.tasks.options import parse_options, refuse_path
from megarl.types import Prompt, Trajectory

CALL = re.compile(r"calc\(([^()\n]{1,200})\)")
QUESTION = "What is {}? Write calc({}) to use a calculator. Then reply with the number only."
NUMBER = re.compile(r"-?[0-9]+")


class Calculator:
    """The sums of the ``arithmetic`` task, with a tool: ``calc(12 + 30)`` is answered by a tool's message."""

    unfinished_metrics: ClassVar[dict[str, float]] = {"correct": 0.0}

    def __init__(self, options: ArithmeticOptions, seed: int) -> None:
        self._sums = ArithmeticTask(options, seed)

    def __len__(self) -> int:
        return len(self._sums)

    def __getitem__(self, index: int) -> Prompt:
        sum_ = self._sums.sum(index)
        text = QUESTION.format(sum_, sum_)
        return Prompt(f"calculator-{index}", ({"role": "user", "content": text},), self._sums[index].data)

    async def rollout(self, prompt: Prompt, client: Client) -> Trajectory:
        """Answer calls of the calculator until a turn has none; that turn is the reply.

        The reward is 1 for the right number alone, 0.6 if it is the last number of the reply, and else 0.2 if the
        calculator was used and gave the right number, so that using it pays before a reply is right.

        Metrics: ``correct``, ``calls``.
        """
        answer, chat, calls, found, text = str(prompt.data["answer"]), Chat(client), 0, False, ""
        try:
            while call := CALL.search(text := (await chat.sample()).text):
                calls += 1
                result = calculate(call[1])
                found |= result == answer
                chat.add({"role": "tool", "content": result})
        except EpisodeLimit:
            text = ""
        numbers = NUMBER.findall(text)
        right = numbers[-1:] == [answer]
        score = 1.0 if text.strip() == answer else 0.6 if right else 0.2 * found
        return client.trajectory(Reward(score, {"correct": float(right), "calls": float(calls)}, (numbers or [""])[-1]))


def calculate(expression: str) -> str:
    """Return the value of a sum of integers, or what is wrong with it.

    >>> calculate("3 + 4 * 5"), calculate("3 + x")
    ('23', 'error: not a sum of integers')
    """
    try:
        value = evaluate(expression)[0]
    except ValueError:
        return "error: not a sum of integers"
    return str(value)


def build(context: TaskContext) -> Calculator:
    """Make the environment from ``task.options``, which are those of ``arithmetic``, and ``train.seed``.

    Raises:
        ConfigError: wrong options, or ``task.path`` is set.
    """
    refuse_path(context)
    return Calculator(parse_options(context, ArithmeticOptions), context.seed)
