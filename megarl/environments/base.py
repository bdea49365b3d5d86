# SPDX-License-Identifier: Apache-2.0
"""Define the interface of an environment: prompts, and the episode that follows each. Does not import torch."""

from typing import Protocol

from megarl.environments.client import Client
from megarl.types import Prompt, Trajectory


class Environment(Protocol):
    """A task whose answers are episodes of several turns.

    Prompts are those of a ``megarl.tasks.Task``: ``environment[i]`` is the same at every call and in every process.
    ``task.name`` names a factory, as for a task. The factory is called in two processes; episodes are played in one of
    them, all in one event loop.

    An environment may have an attribute ``unfinished_metrics``, a dictionary: the metrics of an episode that gets no
    reward, because a limit or an error ended it (``{"correct": 0.0}``). Without it the means of its metrics leave such
    episodes out.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...

    async def rollout(self, prompt: Prompt, client: Client) -> Trajectory:
        """Play one episode.

        Args:
            prompt: one of the prompts.
            client: draws turns from the policy, and keeps what it drew.

        Returns:
            ``client.trajectory(reward)``, most often.
        """
        ...
