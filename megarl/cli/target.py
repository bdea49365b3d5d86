# SPDX-License-Identifier: Apache-2.0
"""Find what `megarl eval`, `sample` and `serve` are to use: a run's adapter, a PEFT directory or a model."""

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from megarl.checkpoint_engine.folder_source import FolderSource
from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.cli.export import find_adapter
from megarl.config import ModelConfig, RunConfig, check_run, override_config
from megarl.config.checks import read_model_shape
from megarl.config.load import load_config
from megarl.config.sections.eval import Sampling
from megarl.errors import ConfigError
from megarl.files import read_json, user_path
from megarl.hub import is_hub_id, local_model
from megarl.run_folder import CONFIG, checkpoints
from megarl.sampler.process import SamplerProcess
from megarl.types import Completion

ADAPTER_CONFIG, MODEL_CONFIG = "adapter_config.json", "config.json"
# ``RUN@STEP``
AT_STEP = re.compile(r"(.+)@([0-9]{1,9})", re.ASCII)
HELP = "run folder (RUN@STEP: the checkpoint of that step), PEFT directory, Hugging Face folder or hub id"


@dataclass(frozen=True)
class Target:
    """A model, with or without an adapter.

    Attributes:
        label: as the user wrote it.
        config: config of the run, or the defaults, with a local ``model.path``. ``lora.init_from`` is the adapter.
        run: the run folder, or None.
    """

    label: str
    config: RunConfig
    run: Path | None = None

    @property
    def adapter(self) -> str | None:
        """The PEFT directory, or None for the base model."""
        return self.config.lora.init_from

    def like(self, model: ModelConfig) -> "Target":
        """Return the target with the dtype of another model section; of the same folder, with all of the section."""
        trained = self.config.model
        section = model if trained.path == model.path else trained.model_copy(update={"dtype": model.dtype})
        return replace(self, config=self.config.model_copy(update={"model": section}))


def find_target(text: str, overrides: Sequence[str] = ()) -> Target:
    """Find a target.

    Args:
        text: see ``HELP``.
        overrides: ``section.key=value``, on top of the run's settings or the defaults.

    Raises:
        ConfigError: it is none of these, its base model is not known, or a setting is wrong.
        CheckpointError: the run has no adapter yet, none of that step, or its base model has changed.
    """
    folder, step = _folder_of(text)
    if (folder / CONFIG).is_file():
        config = load_config(folder / CONFIG, overrides)
        adapter = find_adapter(folder, step)
        target = _checked(text, config, str(adapter), folder)
        _check_base(folder, target.config)
        return target
    if step is not None:
        raise ConfigError(
            f"TARGET is '{text}', but '{text.rpartition('@')[0]}' is not a run folder: it holds no {CONFIG}"
        )
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_json(folder / ADAPTER_CONFIG, "TARGET", ConfigError).get("base_model_name_or_path")
        if not any(item.startswith("model.path=") for item in overrides):
            if not isinstance(base, str) or not (is_hub_id(base) or user_path("TARGET", base).is_dir()):
                raise ConfigError(
                    f"TARGET is '{text}', an adapter whose base model '{base}' is not here; name it by model.path=MODEL"
                )
            overrides = [f"model.path={base}", *overrides]
        return _checked(text, _plain_config(overrides), str(folder))
    if (folder / MODEL_CONFIG).is_file() or (not folder.exists() and is_hub_id(text)):
        return _checked(text, _plain_config([f"model.path={text}", *overrides]), None)
    raise ConfigError(
        f"TARGET is '{text}', which is neither a run folder ({CONFIG}), nor a PEFT directory ({ADAPTER_CONFIG}), nor a "
        f"Hugging Face folder ({MODEL_CONFIG}), nor the id of a model on the hub"
    )


def is_run(text: str) -> bool:
    """Return True if a target is a run, or a step of one."""
    return (_folder_of(text)[0] / CONFIG).is_file()


def _folder_of(text: str) -> tuple[Path, int | None]:
    """Return a target's folder, and the step that it names."""
    match, folder = AT_STEP.fullmatch(text), user_path("TARGET", text)
    if match and not folder.exists():
        return user_path("TARGET", match[1]), int(match[2])
    return folder, None


class TargetEngine:
    """An engine that samples from one target at a time. Use it as a context manager.

    vLLM reads the base model from disk. An adapter is sent as a trainer would send it, with the same checks.

    Args:
        targets: at least one, of one base model; the adapter of the highest rank decides on the engine's buffers.
        config: gives sampler, device and the longest completion.
        log: file of the engine's output.

    Raises:
        ConfigError, UnsupportedError: the model, its adapter or a length does not fit.
    """

    def __init__(self, targets: Sequence[Target], config: RunConfig, log: Path) -> None:
        from megarl.sampler.engine.adapters import max_lora_rank

        adapted = [target.config for target in targets if target.adapter]
        lora = max(adapted or [targets[0].config], key=lambda one: max_lora_rank(one.engine)).lora
        check_run(config.model_copy(update={"model": targets[0].config.model, "lora": lora}))
        section = config.checkpoint_engine.model_copy(
            update={"base_weights": "disk", "content": "adapter", "transport": "shm"}
        )
        self._engine = SamplerProcess(
            targets[0].config.model,
            lora=lora,
            sampler=config.sampler,
            checkpoint_engine=section,
            device=config.train.device,
            log=log,
            longest_response=config.longest_response,
        )
        self._source = FolderSource()
        self._manager = CheckpointEngineManager(self._source, [self._engine], section)

    def load(self, target: Target, version: int) -> None:
        """Make a target the version that is sampled from; each has a larger number than the one before.

        Raises:
            AdapterError: a file of the adapter is missing or damaged.
            WeightSyncError: the adapter does not fit the model.
            WorkerError: vLLM did not start.
        """
        self._engine.wait()
        if target.adapter is None:
            self._engine.use_base(version)
        else:
            self._source.read(Path(target.adapter), version)
            self._manager.sync(version, "adapter")

    def generate(
        self, prompts: Sequence[np.ndarray], version: int, seeds: Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """See ``VllmSampler.generate``."""
        return self._engine.generate(prompts, version, seeds, sampling)

    def turn(
        self, prompt: np.ndarray, seed: int, version: int | None, sampling: Sampling, home: object = None
    ) -> Future[Completion]:
        """See ``SamplerProcess.turn``."""
        return self._engine.turn(prompt, seed, version, sampling)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.close()


@contextmanager
def engine_logs() -> Iterator[Path]:
    """Yield a folder for logs, which stays if the block raises: its error may name a file there."""
    folder = Path(tempfile.mkdtemp(prefix="megarl-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _plain_config(overrides: Sequence[str]) -> RunConfig:
    # The task is only a place for defaults: nothing builds it.
    return override_config({"model": {"path": ""}, "task": {"name": "arithmetic"}}, overrides)


def _checked(text: str, config: RunConfig, adapter: str | None, run: Path | None = None) -> Target:
    model = config.model.model_copy(update={"path": local_model(config.model.path)})
    lora = config.lora.model_copy(update={"init_from": adapter})
    config = config.model_copy(update={"model": model, "lora": lora})
    read_model_shape(model.path)
    return Target(text, config, run)


def _check_base(run: Path, config: RunConfig) -> None:
    """Refuse a base model that is not the one that the run was trained on."""
    from megarl.families import add_family
    from megarl.model.checkpoint.digests import read_state
    from megarl.model.checkpoint.training_state import check_base

    add_family(config.model.family)
    for last in checkpoints(run)[-1:]:
        check_base(last, read_state(last), config.model.path)
