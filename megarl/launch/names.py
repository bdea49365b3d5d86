# SPDX-License-Identifier: Apache-2.0
"""Resolve the paths and the names of a config, before anything is started."""

import os
from pathlib import Path

import torch

from megarl.checkpoint_engine.base import load_transport
from megarl.config import RunConfig
from megarl.config.back_ends import TRANSFORMERS
from megarl.controller.trackers import check_trackers
from megarl.evaluation.sets import with_absolute_files
from megarl.files import user_path
from megarl.hub import local_model
from megarl.loss import build_loss
from megarl.loss.advantages import build_advantages
from megarl.plugins import absolute
from megarl.sampler.engine.device_checks import check_device
from megarl.sampler.engine.settings import check_sampled
from megarl.tasks import TaskContext
from megarl.tasks.options import absolute_files


def check_names(config: RunConfig) -> None:
    """Refuse unknown names and what the sampler cannot do, before any actor starts; an actor would fail a minute later.

    Checked are the loss, the transport and the trackers. ``check_model`` is about the rest.

    Raises:
        ConfigError, UnsupportedError: the message names the nearest registered name, or what is supported.
    """
    build_loss(config.loss)
    build_advantages(config.loss)
    check_trackers(config.train.trackers)
    if config.checkpoint_engine.transport != "auto":
        load_transport(config.checkpoint_engine.transport)
    check_sampled(config.engine)
    # If Ray joins an existing cluster, that cluster decides the device.
    if config.train.device == "cpu" or not (os.environ.get("RAY_ADDRESS") or torch.cuda.is_available()):
        check_device(config.engine, "cpu")


def check_model(config: RunConfig) -> None:
    """Refuse a model or an adapter that cannot be trained.

    Importing PEFT, which knows, takes seconds: it is imported here, where others may wait for something else meanwhile.

    Raises:
        ConfigError, UnsupportedError, AdapterError: the message names what is supported.
    """
    if config.model.backend == TRANSFORMERS:
        from megarl.hf.inspection import inspect_model

        inspect_model(config.trainer, sends_base=config.checkpoint_engine.base_weights == "send")
        return
    from megarl.lora.section import check_section
    from megarl.model.inspection import inspect_folder
    from megarl.model.weights.full_config import names_of

    check_section(config.lora, names_of(inspect_folder(config.model.path, config.parallel)))


def with_absolute_paths(config: RunConfig, recipe_dir: Path) -> RunConfig:
    """Make every path absolute: an actor may have another working directory, and a resume another recipe or none.

    A model of the hub is downloaded here, once, and its snapshot is the path from now on.
    """
    task = absolute_files(TaskContext(config.task, recipe_dir, config.train.seed))
    family = config.model.family and absolute(config.model.family, "model.family", recipe_dir)
    model = config.model.model_copy(update={"path": local_model(config.model.path), "family": family})
    adapter = config.lora.init_from and str(user_path("lora.init_from", config.lora.init_from))
    lora = config.lora.model_copy(update={"init_from": adapter})
    plugins = {name: getattr(config.loss, name) for name in ("name", "advantage")}
    absolute_plugins = {name: absolute(spec, f"loss.{name}", recipe_dir) for name, spec in plugins.items()}
    loss = config.loss.model_copy(update=absolute_plugins)
    transport = absolute(config.checkpoint_engine.transport, "checkpoint_engine.transport", recipe_dir)
    engine = config.checkpoint_engine.model_copy(update={"transport": transport})
    trackers = [absolute(spec, "train.trackers", recipe_dir) for spec in config.train.trackers]
    train = config.train.model_copy(update={"trackers": trackers})
    sets = [with_absolute_files(one, config.task, recipe_dir, config.train.seed) for one in config.eval.tasks]
    evaluation = config.eval.model_copy(update={"tasks": sets})
    sections = {"model": model, "lora": lora, "task": task, "loss": loss, "checkpoint_engine": engine, "train": train}
    return config.model_copy(update=sections | {"eval": evaluation})
