# SPDX-License-Identifier: Apache-2.0
"""An environment of verifiers: find the letter that follows another; a wrong reply is answered by a hint."""

import random
import string

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

LETTERS = string.ascii_uppercase


class AlphabetConfig(vf.TasksetConfig):
    """Settings: number of rows, and seed of their order."""

    rows: int = 100
    seed: int = 0


class AlphabetData(vf.TaskData):
    """A row: its prompt, and the letter that is right."""

    answer: str


class AlphabetTask(vf.Task[AlphabetData, vf.State, vf.TaskConfig]):
    """Rewards the right letter, less for one that needed a hint, and any single letter a little."""

    @vf.reward(weight=1.0)
    async def found(self, trace: vf.Trace) -> float:
        """Return 1 for the first reply, 0.5 for the second."""
        return float(letter(trace.last_reply) == self.data.answer) / trace.num_turns

    @vf.reward(weight=0.1)
    async def brief(self, trace: vf.Trace) -> float:
        """Return 1 if the last reply is one letter."""
        return float(letter(trace.last_reply) != "")

    @vf.metric
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1 for the right letter."""
        return float(letter(trace.last_reply) == self.data.answer)


class AlphabetTaskset(vf.Taskset[AlphabetTask, AlphabetConfig]):
    """Asks for the letter after one that is drawn at random."""

    def load(self):
        """Yield the rows."""
        draw = random.Random(self.config.seed)
        for _ in range(self.config.rows):
            place = draw.randrange(len(LETTERS) - 1)
            prompt = f"Which letter comes after {LETTERS[place]}? Reply with the letter only."
            yield AlphabetTask(AlphabetData(prompt=prompt, answer=LETTERS[place + 1]), self.config.task)


class HintHarness(vf.Harness[vf.HarnessConfig]):
    """Asks, and gives one hint after a wrong reply. It runs in verifiers' process, and no code of the policy."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Play the conversation against the endpoint that verifiers gives."""
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as policy:
            for hint in (f"No. It comes before {after(data.answer)}.", None):
                answer = await policy.chat.completions.create(model=ctx.model, messages=messages)
                said = answer.choices[0].message.content or ""
                if letter(said) == data.answer or hint is None:
                    break
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
        return ProgramResult(0, "", "")


def letter(text: str) -> str:
    """Return the only letter of a reply, or nothing.

    >>> letter(" d. "), letter("It is D")
    ('D', '')
    """
    found = text.strip().rstrip(".").upper()
    return found if len(found) == 1 and found in LETTERS else ""


def after(this: str) -> str:
    """Return the letter after this one; A comes after Z."""
    return LETTERS[(LETTERS.index(this) + 1) % len(LETTERS)]


__all__ = ["AlphabetTaskset", "HintHarness"]
