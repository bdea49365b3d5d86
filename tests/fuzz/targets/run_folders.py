# SPDX-License-Identifier: Apache-2.0
"""Run folders on resume: a named error that leaves the folder as it was, or the run's state."""

import hashlib
import json
import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.cli.resume import load_resumed_config
from megarl.config import RunConfig, check_run, load_config
from megarl.config.resume import settings_of
from megarl.controller.going_back import resume
from megarl.controller.recording.metrics import Recorder
from megarl.controller.recording.resumption import find_resumption
from megarl.controller.recording.screen import Screen
from megarl.controller.rollouts.rollout import Rollout
from megarl.controller.state import RunState
from megarl.errors import MegarlError
from megarl.launch.contents import contents_of
from megarl.launch.names import check_model, check_names, with_absolute_paths
from megarl.launch.run import make_stream, prepare_task
from megarl.lora import attach
from megarl.model.megatron_model import MegatronModel
from megarl.parallel.device import pick_device
from megarl.parallel.groups import init_groups
from megarl.tasks.held_out import training_part
from tests.fuzz.harness import Mutation, WrongResult
from tests.fuzz.mutate import ODD, bytes_of, json_of, safetensors_of, yaml_of
from tests.helpers.models import make_model
from tests.helpers.tiny_run import everything, train
from tests.helpers.train_run import RECIPE, REWARD

STEPS = 3
OVERRIDES = "overrides.json"
# Settings outside loss, lora and task that decide what is learned; and those inside that do not.
DECIDE = ("train.learning_rate", "train.schedule", "train.seed", "train.max_grad_norm", "train.updates_per_step",
          "sampler.temperature", "sampler.samples_per_prompt", "sampler.seed", "model.dtype")  # fmt: skip
HARMLESS = ("task.reward", "task.reward_threads")


class Alone:
    """The trainer's ranks as the loop sees them: one rank, in this process."""

    def __init__(self, model: MegatronModel) -> None:
        self.model = model

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.model, method)(*args)]


class RunFolders:
    """A run of three steps, each with a checkpoint, and its resume up to the point at which training would continue."""

    def make(self, folder: Path) -> None:
        path = make_model(folder.parent / "model", "qwen3", tied=True, num_hidden_layers=1, head_dim=32)
        make_tokenizer(path)
        (folder.parent / "reward.py").write_text(REWARD)
        recipe = folder.parent / "recipe.yaml"
        recipe.write_text(RECIPE.replace("MODEL", str(path)).replace("{data: 2}", "{data: 1}"))
        # Few targets and prompts, because all prompts are encoded for every case.
        overrides = ["lora.target_modules=[q_proj, down_proj]", "task.options.size=12"]
        config = with_absolute_paths(load_config(recipe, overrides), folder.parent)
        check_run(config)
        self.settings = settings_of(config)
        groups = init_groups(config.parallel, pick_device("auto"), seed=5)
        lora = config.lora.peft_settings()
        self.model = MegatronModel(config.trainer, groups, attach(LoraConfig(**lora)))
        (folder / "run").mkdir()
        (folder / OVERRIDES).write_text("[]")
        state = self._state(folder / "run", config)
        state.recorder.begin()
        self.truth = {}
        for step in range(1, STEPS + 1):
            train(self.model, range(step, step + 1))
            state.stream.next(2)
            state.step = state.updates = step
            state.recorder.write_rollout(step, Rollout([], [], [], [], [], []))
            state.recorder.rollout_written()
            state.recorder.step({"step": step, "reward": step / 7})
            state.recorder.checkpoint(state.trainers, step, state.to_json())
            self.model.finish_checkpoint()
            self.truth[step] = self._digest(state)
        state.recorder.close()

    def _state(self, run: Path, config: RunConfig) -> RunState:
        task, tokenizer = prepare_task(config, run)
        stream = make_stream(config, training_part(task, config.task.held_out), tokenizer)
        origin = {"settings": settings_of(config), "contents": contents_of(config, task, stream.encode)}
        recorder = Recorder(run, config, Screen(STEPS))
        recorder.hold()
        nothing: Any = None
        trainers: Any = Alone(self.model)
        return RunState(
            config=config,
            trainers=trainers,
            samplers=nothing,
            manager=nothing,
            judge=nothing,
            stream=stream,
            decode=nothing,
            recorder=recorder,
            staff=SimpleNamespace(restarts={}),  # type: ignore[arg-type]
            origin=origin,
        )

    def _digest(self, state: RunState) -> str:
        """Digest everything that training continues from."""
        whole = hashlib.sha256(repr((state.step, state.updates, self.model.version, state.stream.state())).encode())
        for name, tensor in sorted(everything(self.model).items()):
            whole.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return whole.hexdigest()

    def mutate(self, folder: Path, draw: Random) -> Mutation:
        run = folder / "run"
        checkpoint = run / "checkpoints" / f"step-{draw.choice([STEPS, STEPS, STEPS, STEPS - 1]):06d}"
        kind = draw.choice(["config", "config", "metrics", "state", "state", "tensors", "tensors", "file", "folders",
                            "override", "override"])  # fmt: skip
        if kind == "config":
            return draw.choice([yaml_of, yaml_of, bytes_of])(run / "config.yaml", draw)
        if kind == "metrics":
            return bytes_of(run / "metrics.jsonl", draw)
        if kind == "state":
            return draw.choice([json_of, json_of, bytes_of])(checkpoint / "state.json", draw)
        if kind == "tensors":
            file = draw.choice(["optimizer.safetensors", "rng.safetensors", "adapter/adapter_model.safetensors"])
            return draw.choice([safetensors_of, bytes_of])(checkpoint / file, draw)
        if kind == "file":
            files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != "config.yaml")
            return bytes_of(draw.choice(files), draw)
        if kind == "folders":
            return self._change_folders(run, draw)
        return self._override(folder, draw)

    def _change_folders(self, run: Path, draw: Random) -> Mutation:
        """Remove, rename or exchange whole folders."""
        saved = run / "checkpoints"
        first, second = draw.sample(sorted(saved.glob("step-*")), 2)
        kind = draw.choice(["gone", "renamed", "swapped", "adapter", "all"])
        if kind == "gone":
            shutil.rmtree(first)
        elif kind == "renamed":
            first.rename(saved / draw.choice(["step-000009", "step-x", "step-", "000001"]))
        elif kind == "swapped":
            first.rename(saved / "x")
            second.rename(first)
            (saved / "x").rename(second)
        elif kind == "adapter":
            shutil.rmtree(first / "adapter")
            shutil.copytree(second / "adapter", first / "adapter")
        else:
            shutil.rmtree(draw.choice([saved, run / "rollouts", run]))
        return Mutation(f"{kind} {first.name} {second.name}")

    def _override(self, folder: Path, draw: Random) -> Mutation:
        """Change a setting, take another reward, or an older checkpoint."""
        (folder / "same.py").write_text(REWARD)
        (folder / "other.py").write_text(REWARD.replace("8", "9"))
        name = draw.choice(sorted(self.settings))
        text = draw.choice(
            [
                f"{name}={json.dumps(draw.choice(ODD))}",
                f"{name}={draw.choice(ODD)}",
                f"task.reward={folder}/{draw.choice(['same', 'other'])}.py:reward",
                f"train.resume_step={draw.choice([-1, 0, 1, 2, 3, 4, 10**19, 'x'])}",
                f"train.resume_changes=[{name}]",
            ]
        )
        (folder / OVERRIDES).write_text(json.dumps([text]))
        return Mutation(f"override {text[:80]!r}")

    def check(self, folder: Path) -> None:
        run = folder / "run"
        before = _tree(run)
        state = None
        try:
            config = load_resumed_config(str(run), json.loads((folder / OVERRIDES).read_text()))
            config = with_absolute_paths(config, folder)
            check_names(config)
            check_model(config)
            state = self._state(run, config)
            resumption = find_resumption(run, config, state.origin["contents"])
            if config.parallel.world_size > 1:  # may change, but needs more ranks than this test has
                return
            resume(state, resumption)
        except MegarlError:
            if _tree(run) != before:
                raise WrongResult("a resume that failed has changed the run folder") from None
            raise
        finally:
            if state:
                state.recorder.close()
        self._compare(run, state, config)

    def _compare(self, run: Path, state: RunState, config: RunConfig) -> None:
        if self._digest(state) != self.truth.get(state.step):
            raise WrongResult(f"the state is not that of step {state.step}")
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        if steps not in ([], list(range(1, state.step + 1))):
            raise WrongResult(f"metrics of steps {steps} at step {state.step}")
        saved = load_config(run / "config.yaml")
        now = settings_of(saved)
        if now != settings_of(config) or saved.train.resume or saved.train.resume_step or saved.train.resume_changes:
            raise WrongResult("the config that is saved is not the run's")
        for name, value in self.settings.items():
            decides = name.partition(".")[0] in ("loss", "lora", "task") or name in DECIDE
            if decides and name not in HARMLESS and name not in config.train.resume_changes and now[name] != value:
                raise WrongResult(f"{name} was {value!r} and is {now[name]!r}, unsaid")


def _tree(folder: Path) -> dict[str, bytes]:
    """Return every file except the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
