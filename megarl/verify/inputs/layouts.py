# SPDX-License-Identifier: Apache-2.0
"""Name, list and filter layouts, and choose the layout at which a checkpoint is reloaded. Loads no torch."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from megarl.config import ParallelConfig, RunConfig, TrainerConfig, check_run, parse_config
from megarl.config.back_ends import TRANSFORMERS
from megarl.errors import ConfigError, UnsupportedError

# Axis -> its abbreviation in a layout's name.
SHORT = {
    "tensor": "TP",
    "pipeline": "PP",
    "virtual_pipeline": "VPP",
    "context": "CP",
    "expert": "EP",
    "expert_tensor": "ETP",
    "data": "DP",
}


def label(parallel: ParallelConfig) -> str:
    """Return a layout's name, such as ``TP2+SPxPP2xDP2``; ``TP1`` if nothing is parallel."""
    parts = []
    for axis, short in SHORT.items():
        size = getattr(parallel, axis)
        if size > 1:
            parts.append(f"{short}{size}{'+SP' if axis == 'tensor' and parallel.sequence_parallel else ''}")
    return "x".join(parts) or "TP1"


def place_name(config: RunConfig | TrainerConfig) -> str:
    """Return the name of a config's layout, with the back end where it is not Megatron-Core."""
    if config.model.backend != TRANSFORMERS:
        return label(config.parallel)
    return _transformers_name(config.parallel, config.train.shard_base)


def _transformers_name(parallel: ParallelConfig, shard_base: bool) -> str:
    name = label(parallel) if parallel.data > 1 else ""
    return f"{TRANSFORMERS}{f' {name}' if name else ''}{'+shards' if shard_base else ''}"


def with_parallel(config: RunConfig, parallel: ParallelConfig) -> RunConfig:
    """Return the config at another layout, checked again.

    Raises:
        ConfigError: the layout contradicts itself or the model.
        UnsupportedError: the layout is not tested.
    """
    return _with_sections(config, {"parallel": parallel.model_dump()})


def _with_sections(config: RunConfig, sections: Mapping[str, Any]) -> RunConfig:
    """Return the config with other sections, checked again; raises as ``with_parallel``."""
    moved = parse_config({**config.model_dump(), **sections})
    check_run(moved)
    return moved


def all_layouts(ranks: int) -> Iterator[ParallelConfig]:
    """Yield layouts of at most ``ranks``: TP, SP, PP, VPP, CP, EP, ETP each off and on, and DP by powers of two."""
    switch = (1, 2)
    for tensor, pipeline, virtual, context, expert, expert_tensor in product(switch, repeat=6):
        data = 1
        while tensor * pipeline * context * data <= ranks:
            for sequence in (True, False) if tensor > 1 else (False,):
                yield ParallelConfig(
                    tensor=tensor,
                    pipeline=pipeline,
                    virtual_pipeline=virtual,
                    context=context,
                    expert=expert,
                    expert_tensor=expert_tensor,
                    data=data,
                    sequence=sequence,
                )
            data *= 2


def allowed_layouts(
    config: RunConfig, ranks: int, *, transformers: bool = False
) -> tuple[dict[str, RunConfig], dict[str, list[str]]]:
    """Sort ``all_layouts`` into allowed and refused by the config's own checks.

    Args:
        config: the config at any layout.
        ranks: largest number of ranks.
        transformers: True adds the layouts of ``model.backend: transformers``.

    Returns:
        ``(name -> config, fewest ranks first; reason -> names refused for it)``. Layouts that contradict themselves
        (virtual stages without a pipeline) or the model (experts of a dense one) are in neither.
    """
    layouts = sorted(all_layouts(ranks), key=lambda p: p.world_size)
    sections: dict[str, dict[str, Any]] = {label(parallel): {"parallel": parallel.model_dump()} for parallel in layouts}
    if transformers:
        sections |= _of_transformers(config, ranks)
    allowed: dict[str, RunConfig] = {}
    refused: dict[str, list[str]] = {}
    for name, changes in sections.items():
        try:
            allowed[name] = _with_sections(config, changes)
        except ConfigError:
            continue
        except UnsupportedError as error:
            refused.setdefault(str(error), []).append(name)
    return allowed, refused


def _of_transformers(config: RunConfig, ranks: int) -> dict[str, dict[str, Any]]:
    """Return ``name -> changed sections`` of the layouts of ``model.backend: transformers``, one rank first."""
    model, train = config.model.model_dump() | {"backend": TRANSFORMERS}, config.train.model_dump()
    found = {}
    for data, shards in ((1, False), (2, False), (2, True)):
        if data <= ranks:
            parallel = ParallelConfig(data=data)
            changes = {"model": model, "parallel": parallel.model_dump(), "train": train | {"shard_base": shards}}
            found[_transformers_name(parallel, shards)] = changes
    return found


def chosen_layouts(
    allowed: dict[str, RunConfig], refused: dict[str, list[str]], names: Sequence[str]
) -> tuple[dict[str, RunConfig], dict[str, list[str]]]:
    """Return what ``allowed_layouts`` returned without the layouts that have none of the names; all without names.

    Args:
        allowed, refused: what ``allowed_layouts`` returned.
        names: names; ``*`` is any characters.

    Raises:
        ConfigError: no allowed layout has one of the names.
    """
    if not names:
        return allowed, refused
    for name in names:
        if not any(fnmatchcase(layout, name) for layout in allowed):
            raise ConfigError(
                f"--layouts has '{name}', and no allowed layout is named so; they are {', '.join(allowed)}"
            )

    def kept(layout: str) -> bool:
        return any(fnmatchcase(layout, name) for name in names)

    left = {reason: [layout for layout in layouts if kept(layout)] for reason, layouts in refused.items()}
    return (
        {layout: config for layout, config in allowed.items() if kept(layout)},
        {reason: layouts for reason, layouts in left.items() if layouts},
    )


def other_layout(config: RunConfig, ranks: int) -> RunConfig | None:
    """Choose the layout at which a checkpoint is reloaded: the allowed one that cuts tensors most differently.

    Megatron-Core reloads a checkpoint of transformers on one rank. If it has not the family, or there are experts,
    which transformers stacks, transformers reloads it with a whole base instead of shards, or with shards instead.

    Args:
        config: config at which the checkpoint is saved.
        ranks: largest number of ranks.

    Returns:
        The config at that layout; None if no other layout is allowed in so many ranks.
    """
    if config.model.backend == TRANSFORMERS:
        tree = config.model_dump()
        # Imported here: it imports torch.
        from megarl.verify.inputs.model_facts import has_experts, is_listed

        path = Path(config.model.path).expanduser()
        if not is_listed(path) or has_experts(path):
            return parse_config(tree | {"train": tree["train"] | {"shard_base": not config.train.shard_base}})
        changes = {
            "model": tree["model"] | {"backend": "local"},
            "parallel": ParallelConfig().model_dump(),
            "train": tree["train"] | {"shard_base": False},
        }
        return parse_config(tree | changes)
    allowed, _ = allowed_layouts(config, ranks)
    others = [other for other in allowed.values() if label(other.parallel) != label(config.parallel)]

    def distance(other: RunConfig) -> tuple[int, int]:
        cutting = [axis for axis in SHORT if axis not in ("data", "context")]
        changed = sum(getattr(other.parallel, axis) != getattr(config.parallel, axis) for axis in cutting)
        return changed, -other.parallel.world_size

    return max(others, key=distance, default=None)


def describe_refused(refused: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one line per reason."""
    return [f"{', '.join(labels)}: {reason}" for reason, labels in refused.items()]
