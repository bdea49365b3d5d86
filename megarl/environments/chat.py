# SPDX-License-Identifier: Apache-2.0
"""Hold a conversation as token ids that only grow: what was drawn is never tokenised again."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.environments.client import Client, Turn
from megarl.errors import ConfigError, EpisodeError

# A conversation that shows what a template does to earlier turns. Reasoning is what templates drop.
QUESTION = {"role": "user", "content": "MEGARL-QUESTION"}
ANSWER = "<think>\nMEGARL-THOUGHT\n</think>\n\nMEGARL-ANSWER"


class Chat:
    """A conversation of an episode.

    Attributes:
        ids: everything said so far, int64.
    """

    def __init__(
        self, client: Client, ids: np.ndarray | None = None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """
        Args:
            client: of the episode.
            ids: how the conversation begins, with the header of the policy's turn; default: the episode's prompt.
            tools: what the chat template was given as ``tools`` for ``ids``.
        """
        self._client, self.ids = client, client.prompt_ids if ids is None else ids
        self._tools = tools
        self._last: Turn | None = None
        self._said: list[Mapping[str, Any]] = []

    def copy(self) -> "Chat":
        """Return a conversation that has begun in the same way."""
        chat = Chat(self._client, self.ids, self._tools)
        chat._last, chat._said = self._last, list(self._said)
        return chat

    def add(self, *messages: Mapping[str, Any]) -> None:
        """Say something to the policy, before its next turn.

        Args:
            messages: as the chat template takes them: ``{"role": "user", "content": "Higher."}``.
        """
        self._said += messages

    async def sample(self, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        """Draw the next turn; a turn that was cut short by its limit goes on if nothing was said since.

        Args:
            max_tokens, stop: see ``Client.sample``.

        Raises:
            EpisodeLimit, MegarlError: see ``Client.sample``.
            EpisodeError: the policy has ended its turn and nothing was said since.
            ConfigError: see ``following``.
        """
        if self._said:
            self.ids = np.concatenate([self.ids, self._following()])
            self._said = []
        elif self._last is not None and self._last.finish_reason == "stop":
            raise EpisodeError("chat.sample: the policy has ended its turn; add a message before the next one")
        turn = await self._client.sample(self.ids, max_tokens, stop)
        self.ids, self._last = np.concatenate([self.ids, turn.ids]), turn
        return turn

    def _following(self) -> np.ndarray:
        if self._last is None:
            raise EpisodeError("chat.add: the prompt asks for a turn; sample it before a message is added")
        template = {**self._client.template, **({"tools": self._tools} if self._tools else {})}
        ids = self._client.encode(following(self._client.tokenizer, template, self._said))
        # The template ends the policy's turn. If the policy has done that by itself, it is not done twice.
        ended = self._last.finish_reason == "stop" and len(ids) > 0 and ids[0] == self._last.ids[-1]
        return ids[1:] if ended else ids


def following(tokenizer: Any, template: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that a chat template puts after the assistant's words: end of turn, messages, next header.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        template: variables of the template.
        messages: what is said to the assistant.

    Raises:
        ConfigError: with these messages the template renders the assistant's turn otherwise than it was drawn, such as
            without its reasoning. The policy would then be trained on other tokens than it drew.
        EpisodeError: the template refuses the messages.
    """

    def render(chat: Sequence[Mapping[str, Any]]) -> str:
        return tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=True, **template)

    try:
        head = render([QUESTION]) + ANSWER
        whole = render([QUESTION, {"role": "assistant", "content": ANSWER}, *messages])
    except Exception as error:  # a template may raise anything
        raise EpisodeError(f"the model's chat template refuses {list(messages)}: {error}") from error
    if not whole.startswith(head):
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ConfigError(
            f"the chat template of '{tokenizer.name_or_path}' rewrites earlier turns when a message ({roles}) follows: "
            f"a turn drawn as {head!r} becomes {whole[: len(head)]!r}. What was drawn must stay as it is: set "
            "task.chat_template_kwargs.chat_template to one that keeps it, or build the ids for client.sample yourself"
        )
    return whole[len(head) :]
