# SPDX-License-Identifier: Apache-2.0
"""Choose the transport of weights for where a run's actors are, or refuse the one that is set."""

from megarl.checkpoint_engine.choice import choose_transport
from megarl.checkpoint_engine.senders import IN_ONE_MEMORY
from megarl.config import CheckpointEngineConfig
from megarl.controller.actors.sampler_group import SamplerGroup
from megarl.controller.actors.trainer_group import TrainerGroup
from megarl.controller.recording.screen import Screen
from megarl.errors import ConfigError
from megarl.launch.placement.plan import Plan

# Transports whose receivers share memory with the sender.
ON_ONE_HOST = ("shm", "ipc")


def cannot_reach(name: str, plan: Plan) -> bool:
    """Return True if a transport that does not leave its host would have to bring weights from one node to another."""
    near = name in IN_ONE_MEMORY and plan.engines_beside_ranks
    return name in ON_ONE_HOST and plan.engines_apart and not near


def check_transport(name: str, plan: Plan) -> None:
    """Refuse a transport that does not leave its host, if an engine is on another node than what sends to it.

    Raises:
        ConfigError: so it is; the message names the nodes.
    """
    if cannot_reach(name, plan):
        here = plan.nodes[plan.trainer[0]]
        senders = {plan.nodes[bundle].id for bundle in plan.trainer} if name in IN_ONE_MEMORY else {here.id}
        apart = [plan.nodes[bundle] for bundle in plan.engine if plan.nodes[bundle].id != here.id]
        there = next((node for node in apart if node.id not in senders), apart[0])
        raise ConfigError(
            f"checkpoint_engine.transport is '{name}', which stays on one host, but trainer rank 0 is on {here.name} "
            f"and an engine on {there.name}; set it to gloo or auto"
        )


def resolve_transport(
    section: CheckpointEngineConfig, trainers: TrainerGroup, samplers: SamplerGroup, screen: Screen
) -> CheckpointEngineConfig:
    """Return ``checkpoint_engine`` with ``auto`` replaced, and tell which transport brings the weights."""
    name, why = section.transport, "as set"
    if name == "auto":
        ranks = trainers.places().result()
        asked = [engine.places(ranks[0]) for engine in samplers.engines]
        receivers = [place for answer in asked for place in answer.result()]
        name, why = choose_transport([rank.memory for rank in ranks], receivers)
    screen.say(f"weights reach the engines by {name}: {why}")
    return section.model_copy(update={"transport": name})
