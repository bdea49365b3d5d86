# SPDX-License-Identifier: Apache-2.0
"""Environments: tasks whose answers are episodes of several turns, with tools or users in between."""

from megarl.environments.base import Environment
from megarl.environments.chat import Chat
from megarl.environments.client import Client, EpisodeLimit, Limits, Turn
from megarl.environments.openai_endpoint import endpoint
from megarl.types import Trajectory

__all__ = ["Chat", "Client", "Environment", "EpisodeLimit", "Limits", "Trajectory", "Turn", "endpoint"]
