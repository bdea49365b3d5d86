# SPDX-License-Identifier: Apache-2.0
"""Run a training from recipe to summary. Ends everything that it started, whatever happens."""

import contextlib
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from megarl.checkpoint_engine.choice import choose_transport
from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.config import CheckpointEngineConfig, RunConfig, check_run
from megarl.config.changes import changed_yaml
from megarl.config.resume import settings_of
from megarl.controller import async_loop, loop
from megarl.controller.actors.actor_handles import Limit, SamplerGroup, TrainerGroup, wait_all
from megarl.controller.actors.logs import LOGS, log_file
from megarl.controller.actors.pulse import Watch
from megarl.controller.actors.sampler_actor import SamplerEngine
from megarl.controller.actors.trainer import TrainerRank
from megarl.controller.canary import Canary
from megarl.controller.recording.metrics import Recorder
from megarl.controller.recording.resumption import Resumption, find_resumption
from megarl.controller.recording.screen import Screen
from megarl.controller.rollouts.data import EncodedPrompt, PromptStream
from megarl.controller.rollouts.evaluation import Evaluation
from megarl.controller.rollouts.judges import dry_response, dry_run, start_judge
from megarl.controller.rollouts.producer import most_ahead
from megarl.errors import ConfigError, MegarlError
from megarl.evaluation.sets import build_sets
from megarl.files import user_path
from megarl.hub import offline_children
from megarl.launch import placement
from megarl.launch.names import check_names, with_absolute_paths
from megarl.launch.plan import Plan
from megarl.launch.processes import signals_ignored
from megarl.launch.reaper import reaper
from megarl.launch.requeue import find_run
from megarl.launch.resume import contents_of, resume
from megarl.run_folder import CONFIG, run_prefix
from megarl.sampler.settings import check_device
from megarl.tasks import TaskContext, build_task
from megarl.tasks.base import Task, is_environment
from megarl.tasks.held_out import training_part
from megarl.tasks.prompting import ShortPrompts, check_prompts, encode_prompt
from megarl.tokenizer import load_tokenizer

# Everything must have ended 30 s after a failure. An engine gets this much of it to stop by itself.
CLOSE_SECONDS = 10.0
# Calls of an engine at once, beside those that sample: a sync must not wait behind them.
ENGINE_CALLS = 100


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
    config = find_run(with_absolute_paths(config, recipe_dir))
    check_run(config)
    check_names(config)
    task, tokenizer = prepare_task(config, recipe_dir)
    sets = build_sets(config, recipe_dir, tokenizer, lambda: task)
    training = training_part(task, config.task.held_out, [prompt for one in sets for prompt in one.prompts])
    stream = make_stream(config, training, tokenizer)
    origin = {"settings": settings_of(config), "contents": contents_of(config, task, stream.encode)}
    folder = run_folder(config)
    with offline_children(), Screen(config.train.steps) as screen, reaper() as scratch:
        screen.say(f"run folder: {folder}\nsettings that differ from the defaults (all of them: {CONFIG} there):")
        screen.say(textwrap.indent(changed_yaml(config).rstrip(), "  "))
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
            with actors(config, screen, folder, needed, scratch) as (trainers, samplers, transport):
                manager = CheckpointEngineManager(trainers, samplers.engines, transport)
                state = loop.RunState(
                    config=config,
                    trainers=trainers,
                    samplers=samplers,
                    manager=manager,
                    judge=judge,
                    stream=stream,
                    decode=decode,
                    recorder=recorder,
                    canary=Canary(config.model.dtype, stream.first()) if config.checkpoint_engine.canary else None,
                    origin=origin,
                    evaluation=evaluation,
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


def run_loop(state: loop.RunState, resumed: Resumption | None) -> dict[str, Any]:
    """Run the loop to its end and return the run's summary. If it fails, save the last step first."""
    if resumed:
        resume(state, resumed)
    try:
        (async_loop if state.config.train.max_staleness else loop).run(state)
        return state.recorder.finish(state.trainers)
    except BaseException:
        state.recorder.rescue(state.trainers)
        raise


def prepare_task(config: RunConfig, recipe_dir: Path) -> tuple[Task, Any]:
    """Return the task and the tokenizer, after checking every prompt, before anything is started."""
    task = build_task(TaskContext(config.task, recipe_dir, config.train.seed))
    tokenizer = load_tokenizer(config.model.path)
    lengths = check_prompts(task, tokenizer, config.task, config.sampler.max_prompt_tokens)
    return ShortPrompts(task, lengths.dropped) if lengths.dropped else task, tokenizer


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


@contextlib.contextmanager
def actors(
    config: RunConfig, screen: Screen, folder: Path, needed: Path, scratch: Path
) -> Iterator[tuple[TrainerGroup, SamplerGroup, Any]]:
    """Start Ray, trainer ranks and engines side by side. On exit, for whatever reason, end all of them.

    Args:
        config: the resolved config.
        screen: screen that shows the progress.
        folder: the run folder. The actors' output goes to its ``logs``.
        needed: file or folder that the ranks must be able to see: the checkpoint to resume from, or a file of the new
            run folder.
        scratch: folder for files that Ray and vLLM leave.

    Yields:
        The trainer, the samplers, and the ``checkpoint_engine`` section with its transport resolved.
    """
    screen.phase("Ray")
    placement.start_ray(config, scratch)
    ranks: list[Any] = []
    engines: list[Any] = []
    group = watch = None
    try:
        plan, group = placement.place(config)
        screen.say(plan.describe())
        check_device(config.engine, "cuda" if plan.trainer_gpus else "cpu")
        screen.phase("building")
        rank_names = [f"trainer rank {index}" for index in range(len(plan.trainer))]
        engine_names = [f"sampler {index}" for index in range(len(plan.engine))]
        watch = Watch([*rank_names, *engine_names], folder / LOGS, config.train.hang_seconds)
        shared = ray.put(config)
        for index, name in enumerate(rank_names):
            place = placement.options(group, plan.trainer[index], plan.trainer_gpus)
            ranks.append(ray.remote(TrainerRank).options(**place).remote(shared, watch.participant(name, index)))
        for index, name in enumerate(engine_names):
            place = placement.options(group, plan.engine[index], plan.engine_gpus)
            arguments = (shared, plan.engine_threads, watch.participant(name, index))
            calls_at_once = ENGINE_CALLS + most_ahead(config) * config.sampler.samples_per_prompt
            engines.append(ray.remote(SamplerEngine).options(**place, max_concurrency=calls_at_once).remote(*arguments))
        trainers = TrainerGroup(ranks, watch, config.train)
        samplers = SamplerGroup(dict(zip(engine_names, engines, strict=True)), watch, config.sampler)
        check_shared(needed, trainers, plan)
        limit = Limit("train.build_seconds", config.train.build_seconds)
        address, port = wait_all({"trainer rank 0": ranks[0].rendezvous.remote(plan.ranks_alone)}, watch, limit)[0]
        calls = trainers.start("build", address, port, plan.trainer_threads)
        calls |= {engine.name: engine.actor.start.remote() for engine in samplers.engines}
        wait_all(calls, watch, limit)
        yield trainers, samplers, resolve_transport(config.checkpoint_engine, trainers, samplers, screen)
        stop_engines(samplers, screen)
    finally:
        end(ranks + engines, group, watch)


def check_shared(needed: Path, trainers: TrainerGroup, plan: Plan) -> None:
    """Refuse nodes that cannot see the run folder. Rank 0 writes checkpoints there; on resume every rank reads one.

    Raises:
        ConfigError: a rank cannot see it; the message names the rank and its node.
    """
    for rank, seen in enumerate(trainers.call("sees", str(needed))):
        if not seen and (rank == 0 or needed.is_dir()):
            raise ConfigError(
                f"trainer rank {rank} on {plan.nodes[plan.trainer[rank]].name} does not see '{needed}'; put "
                "train.output on a file system that all nodes share"
                + (", or copy the checkpoint there" if rank else ", or start the run on a node with GPUs for rank 0")
            )


def stop_engines(samplers: SamplerGroup, screen: Screen) -> None:
    """Let the engines of a complete run stop by themselves. One that does not is killed later without harm."""
    try:
        samplers.close(CLOSE_SECONDS)
    except MegarlError as error:
        screen.say(f"an engine did not stop by itself and is killed: {error}")


def resolve_transport(
    section: CheckpointEngineConfig, trainers: TrainerGroup, samplers: SamplerGroup, screen: Screen
) -> CheckpointEngineConfig:
    """Return ``checkpoint_engine`` with ``auto`` replaced, and tell which transport brings the weights."""
    name, why = section.transport, "as set"
    if name == "auto":
        sender = trainers.start_on_rank_zero("memory").result()
        receivers = [memory for engine in samplers.engines for memory in engine.memories().result()]
        name, why = choose_transport(sender, receivers)
    screen.say(f"weights reach the engines by {name}: {why}")
    return section.model_copy(update={"transport": name})


def end(actors_started: Sequence[Any], group: Any, watch: Watch | None) -> None:
    """Kill all actors and leave Ray. No signal interrupts it."""
    with signals_ignored():
        for actor in actors_started:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        if watch is not None:
            watch.kill_left()
            watch.close()
        if group is not None:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(group)
        ray.shutdown()
