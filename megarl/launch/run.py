# SPDX-License-Identifier: Apache-2.0
"""Run a training from recipe to summary. Ends everything that it started, whatever happens."""

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.config import RunConfig, check_run, numerics
from megarl.config.changes import changed_yaml
from megarl.config.resume import settings_of
from megarl.controller import async_loop, loop
from megarl.controller.actors.logs import log_file
from megarl.controller.canary import Canary
from megarl.controller.going_back import resume
from megarl.controller.recording.metrics import Recorder
from megarl.controller.recording.resumption import Resumption, find_resumption
from megarl.controller.recording.screen import Screen
from megarl.controller.recording.start_times import StartTimes
from megarl.controller.rollouts.buffer import check_memory
from megarl.controller.rollouts.data import EncodedPrompt, PromptStream
from megarl.controller.rollouts.evaluation import Evaluation
from megarl.controller.rollouts.rewarding.judges import dry_response, dry_run, start_judge
from megarl.controller.state import RunState
from megarl.errors import ConfigError, MegarlError
from megarl.evaluation.sets import build_sets
from megarl.files import user_path
from megarl.hub import offline_children
from megarl.launch.actors import actors
from megarl.launch.contents import contents_of
from megarl.launch.names import check_names, with_absolute_paths
from megarl.launch.placement.ray_start import ray_for
from megarl.launch.reaper import reaper
from megarl.launch.requeue import find_run
from megarl.run_folder import CONFIG, LOGS, run_prefix
from megarl.tasks import TaskContext, build_task
from megarl.tasks.base import Task, is_environment
from megarl.tasks.held_out import training_part
from megarl.tasks.prompting import ShortPrompts, encode_prompt, without_long
from megarl.tokenizer import load_tokenizer


def train(config: RunConfig, recipe_dir: Path) -> Path:
    """Run a recipe.

    Args:
        config: the run's config.
        recipe_dir: folder of the recipe, to which the task's relative paths refer.

    Returns:
        The run folder.

    Raises:
        MegarlError: the run failed; every process that it started has been ended.
    """
    start = StartTimes()
    start.phase("config, task, tokenizer")
    config = find_run(with_absolute_paths(config, recipe_dir))
    check(config)
    with reaper() as scratch, ray_for(config, scratch) as ray_is_there:
        return _train(config, recipe_dir, ray_is_there, start)


def _train(config: RunConfig, recipe_dir: Path, ray_is_there: Callable[[], None], start: StartTimes) -> Path:
    """Prepare the run, start its actors, run the loop; return the run folder."""
    task, tokenizer = prepare_task(config, recipe_dir)
    sets = build_sets(config, recipe_dir, tokenizer, lambda: task)
    training = training_part(task, config.task.held_out, [prompt for one in sets for prompt in one.prompts])
    stream = make_stream(config, training, tokenizer)
    origin = {"settings": settings_of(config), "contents": contents_of(config, task, stream.encode)}
    folder = run_folder(config)
    with offline_children(), Screen(config.train.steps, start=start) as screen:
        screen.say(f"run folder: {folder}")
        say_settings(config, screen)
        recorder = Recorder(folder, config, screen)
        if isinstance(task, ShortPrompts):
            recorder.note_dropped(task.dropped, len(task))
        context = TaskContext(config.task, recipe_dir, config.train.seed)
        judge = start_judge(context, log_file(folder / LOGS, "rewards"), config.model.path, is_environment(task))

        def decode(ids: np.ndarray) -> str:
            return tokenizer.decode(ids, skip_special_tokens=True)

        logs = folder / LOGS
        evaluation = Evaluation(sets, decode, config.sampler.seed, logs, config.model.path, judge) if sets else None
        try:
            recorder.hold()
            if config.task.reward_dry_run:
                screen.phase("reward dry run")
                ids = dry_response(tokenizer)
                first = EncodedPrompt(training[0], stream.encode(training[0]))
                dry_run(judge, first, ids, config.sampler.samples_per_prompt)
                if evaluation:
                    evaluation.dry_run(ids)
            resumed = find_resumption(folder, config, origin["contents"]) if config.train.resume else None
            if not resumed:
                recorder.begin()
            needed = resumed.checkpoint if resumed else folder / CONFIG
            with actors(config, screen, folder, needed, ray_is_there) as staff:
                state = RunState(
                    config=config,
                    trainers=staff.trainers,
                    samplers=staff.samplers,
                    manager=CheckpointEngineManager(staff.trainers, staff.samplers.engines, staff.transport),
                    judge=judge,
                    stream=stream,
                    decode=decode,
                    recorder=recorder,
                    canary=Canary(config.model.dtype, stream.first()) if config.checkpoint_engine.canary else None,
                    origin=origin,
                    evaluation=evaluation,
                    staff=staff,
                )
                summary = run_loop(state, resumed)
        except BaseException:
            recorder.say_how_to_go_on()
            raise
        finally:
            if evaluation:
                evaluation.close()
            judge.close()
            recorder.close()
    screen.summary(summary)
    return folder


def check(config: RunConfig) -> None:
    """Refuse what cannot be run, before anything is started."""
    check_run(config)
    check_names(config)
    check_memory(config, psutil.virtual_memory().available)


def run_loop(state: RunState, resumed: Resumption | None) -> dict[str, Any]:
    """Run the loop to its end and return the run's summary. If it fails, save the last step first."""
    if resumed:
        resume(state, resumed)
    state.recovery.begin()
    try:
        while True:
            try:
                (async_loop if state.config.train.max_staleness else loop).run(state)
                return state.recorder.finish(state.trainers)
            except MegarlError as error:
                state.recovery.restart_trainers(error)  # raises the error if no rank is lost
    except BaseException:
        state.recorder.rescue(state.trainers)
        raise


def prepare_task(config: RunConfig, recipe_dir: Path) -> tuple[Task, Any]:
    """Return the task and the tokenizer, after checking every prompt, before anything is started."""
    task = build_task(TaskContext(config.task, recipe_dir, config.train.seed))
    tokenizer = load_tokenizer(config.model.path)
    return without_long(task, tokenizer, config.task, config.sampler.max_prompt_tokens), tokenizer


def make_stream(config: RunConfig, task: Task, tokenizer: Any) -> PromptStream:
    """Return the stream of prompts, in the order of ``train.seed``."""

    def encode(prompt: Any) -> np.ndarray:
        return encode_prompt(
            tokenizer,
            prompt,
            config.task.system_prompt,
            config.sampler.max_prompt_tokens,
            config.task.chat_template_kwargs,
        )

    return PromptStream(task, encode, config.train.seed)


def run_folder(config: RunConfig) -> Path:
    """Return the run folder: that of ``train.resume``, or a new one below ``train.output``.

    Raises:
        ConfigError: no folder can be made there.
    """
    if config.train.resume:
        return user_path("train.resume", config.train.resume).resolve()
    name = f"{run_prefix(config.task.name)}{time.strftime('%Y%m%d-%H%M%S')}"
    parent = user_path("train.output", config.train.output).resolve()
    for number in range(1000):
        folder = parent / (name if not number else f"{name}-{number}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            return folder
        except FileExistsError:
            if not parent.is_dir():
                raise ConfigError(f"train.output is '{config.train.output}', which is not a folder") from None
        except OSError as error:
            raise ConfigError(
                f"train.output is '{config.train.output}', where no folder can be made: {error.strerror}"
            ) from error
    raise ConfigError(f"train.output is '{config.train.output}', which holds '{name}' and 999 more of its name")


def say_settings(config: RunConfig, screen: Screen) -> None:
    """Show the settings that differ from the defaults, and what one of them sets besides."""
    screen.say(f"settings that differ from the defaults (all of them: {CONFIG} there):")
    screen.say(textwrap.indent(changed_yaml(config).rstrip(), "  "))
    if config.model.numerics == numerics.BITWISE:
        screen.say(numerics.summary())
