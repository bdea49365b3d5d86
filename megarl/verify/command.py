# SPDX-License-Identifier: Apache-2.0
"""Run `megarl verify`: one layout of a model, or all layouts of a tiny model of its family."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from peft import LoraConfig

from megarl.config import RunConfig
from megarl.config.back_ends import TRANSFORMERS
from megarl.config.checks import add_own_family
from megarl.errors import AdapterError, ConfigError, ModelError, UnsupportedError
from megarl.families import WeightMap
from megarl.hf.inspection import inspect_model
from megarl.lora import load_peft_config
from megarl.lora.section import check_section
from megarl.model.inspection import inspect_folder
from megarl.model.weights.full_config import full_config, names_of
from megarl.model.weights.hf_folder import parse_json
from megarl.verify.cases import Case, Place
from megarl.verify.inputs.adapters import make_adapter
from megarl.verify.inputs.layouts import (
    allowed_layouts,
    chosen_layouts,
    describe_refused,
    place_name,
)
from megarl.verify.inputs.model_facts import is_listed
from megarl.verify.inputs.settings import check_dropout
from megarl.verify.inputs.tiny_model import write_tiny
from megarl.verify.run import Report, check_gpus, verify_places

Progress = Callable[[str], None]


def verify_model(config: RunConfig, report: Progress, *, full: bool = True) -> list[Report]:
    """Verify a model at the config's layout.

    Args:
        config: the command's config.
        report: called with lines of progress.
        full: use as many samples as ``--full``.

    Raises:
        ConfigError: the model or the adapter cannot be trained here, or there are too few GPUs. Nothing was started.
        MegarlError: a rank raised it.
    """
    check_gpus(config.parallel.world_size)
    return _verify(config, {place_name(config): config}, report, full=full)


def verify_matrix(
    config: RunConfig, ranks: int, report: Progress, names: Sequence[str] = ()
) -> tuple[list[Report], dict[str, list[str]]]:
    """Verify a tiny model at every allowed layout.

    Args:
        config: config of the tiny model, from ``tiny_config``.
        ranks: largest number of ranks of a layout.
        report: called with lines of progress.
        names: only layouts with one of these names, in which ``*`` is any characters; none means all.

    Returns:
        ``(reports, reason -> layouts refused for it)``.

    Raises:
        ConfigError, MegarlError: as in ``verify_model``; also if no layout has one of the names.
    """
    layouts, refused = matrix_layouts(config, ranks)
    layouts, refused = chosen_layouts(layouts, refused, names)
    check_gpus(max(layout.parallel.world_size for layout in layouts.values()))
    return _verify(config, layouts, report), refused


def matrix_layouts(config: RunConfig, ranks: int) -> tuple[dict[str, RunConfig], dict[str, list[str]]]:
    """Return ``(name -> config, reason -> names refused for it)`` of all layouts of a tiny model, on both back ends.

    Args:
        config: config of the tiny model.
        ranks: largest number of ranks of a layout.

    Raises:
        ConfigError: no layout is allowed.
    """
    # Experts have an adapter for each linear here; transformers stacks them.
    both = config.model.backend == "local" and not _names(config).num_experts
    layouts, refused = allowed_layouts(config, ranks, transformers=both)
    if not layouts:
        raise ConfigError("no layout is allowed: " + "; ".join(describe_refused(refused)))
    return layouts, refused


def tiny_config(config: RunConfig, folder: Path) -> RunConfig:
    """Write a tiny random model of the config's family to a folder, and return the config for it."""
    try:
        hf_config = parse_json(Path(config.model.path).expanduser() / "config.json")
        hf_config.pop("quantization_config", None)  # the tiny model is written in the run's dtype
        write_tiny(full_config(hf_config), folder, dtype=config.model.dtype, seed=config.train.seed)
    except (ModelError, UnsupportedError) as error:
        raise ConfigError(str(error)) from error
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def _verify(
    config: RunConfig, layouts: Mapping[str, RunConfig], report: Progress, *, full: bool = True
) -> list[Report]:
    _check(config)
    with tempfile.TemporaryDirectory(prefix="megarl-verify-") as folder:
        case = Case("model", config, _adapter(config, Path(folder)), Path(folder) / "work", full)
        return verify_places([Place(case, name, layout) for name, layout in layouts.items()], report=report)


def _names(config: RunConfig) -> WeightMap:
    return names_of(inspect_folder(config.model.path, config.parallel))


def _check(config: RunConfig) -> None:
    """Refuse wrong settings before any process is started.

    Raises:
        ConfigError: the model's family, its files or the adapter are wrong.
    """
    add_own_family(config.model)
    try:
        if config.model.backend == TRANSFORMERS and not is_listed(Path(config.model.path).expanduser()):
            inspect_model(config.trainer)
        else:
            _check_names(config)
        peft_config = _peft_config(config)
        check_dropout(peft_config.lora_dropout, f"lora_dropout of lora.init_from '{config.lora.init_from}'")
    except (AdapterError, ModelError, UnsupportedError) as error:
        raise ConfigError(str(error)) from error


def _check_names(config: RunConfig) -> None:
    """Refuse wrong targets of a listed family.

    Raises:
        ModelError, UnsupportedError: the model lacks a target, or the back ends hold its experts differently.
    """
    names = _names(config)
    check_section(config.lora, names)
    if config.model.backend == TRANSFORMERS and names.num_experts and not config.lora.target_parameters:
        raise UnsupportedError(
            "model.backend is 'transformers' with a mixture of experts, which transformers stacks; verify it with "
            "lora.target_parameters=[gate_up_proj,down_proj]"
        )


def _peft_config(config: RunConfig) -> LoraConfig:
    section = config.lora
    if section.init_from:
        return load_peft_config(section.init_from)
    return LoraConfig(**section.peft_settings())


def _adapter(config: RunConfig, folder: Path) -> Path:
    """Return ``lora.init_from``, or make a random adapter with the section's settings."""
    if config.lora.init_from:
        return Path(config.lora.init_from).expanduser()
    model, settings = Path(config.model.path).expanduser(), config.lora.peft_settings()
    return make_adapter(model, folder / "adapter", seed=config.train.seed + 1, **settings)
