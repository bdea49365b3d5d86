# SPDX-License-Identifier: Apache-2.0
"""Export a run's adapter or merged model (`megarl export`)."""

import shutil
from pathlib import Path

from megarl.errors import CheckpointError, ConfigError
from megarl.families import add_family
from megarl.run_folder import ADAPTER, checkpoints, saved_config, step_of


def export_run(run: Path, form: str, out: Path) -> None:
    """Write a run's adapter (``peft``) or its base model with the adapter merged (``merged``).

    Args:
        run: the run folder. Its final adapter is used, or the last checkpoint's if the run did not end.
        form: ``"peft"`` or ``"merged"``.
        out: the folder to write; must not exist.

    Raises:
        ConfigError: ``run`` is not a run folder, or ``out`` exists.
        CheckpointError: the run has saved no adapter yet, or ``model.path`` is no longer the model that it was trained
            on.
        AdapterError, ModelError: a file is damaged.
    """
    config = saved_config(run, "RUN")
    if out.exists():
        raise ConfigError(f"--out '{out}' exists already; name a new folder")
    adapter = find_adapter(run)
    if form == "merged":
        from megarl.lora.merge import merge_folder
        from megarl.model.checkpoint.digests import read_state
        from megarl.model.checkpoint.training_state import check_base

        add_family(config.model.family)
        base = Path(config.model.path).expanduser()
        for last in checkpoints(run)[-1:]:
            check_base(last, read_state(last), base)
        merge_folder(base, adapter, out)
        return
    from megarl.files import write_directory, writing

    if config.lora.save_experts != "as_trained":
        from megarl.lora.files.peft_folder import convert
        from megarl.model.weights.full_config import names_of
        from megarl.model.weights.hf_folder import read_config

        add_family(config.model.family)
        names = names_of(read_config(Path(config.model.path).expanduser()))
        convert(adapter, out, names, config.lora.save_experts)
        return
    with writing(out, ConfigError), write_directory(out) as partial:
        shutil.copytree(adapter, partial, dirs_exist_ok=True)


def find_adapter(run: Path, step: int | None = None) -> Path:
    """Return the final adapter, or that of the newest checkpoint, or that of a step.

    Raises:
        CheckpointError: there is none, or the checkpoint is damaged.
    """
    from megarl.model.checkpoint.digests import verify

    if step is not None:
        held = {step_of(checkpoint): checkpoint for checkpoint in checkpoints(run)}
        if step not in held:
            steps = ", ".join(map(str, held)) or "none"
            raise CheckpointError(f"'{run}' has no checkpoint of step {step}; it has complete ones of steps: {steps}")
        verify(held[step])
        return held[step] / ADAPTER
    if (run / ADAPTER / "adapter_config.json").is_file():
        return run / ADAPTER
    for last in checkpoints(run)[-1:]:
        verify(last)
        return last / ADAPTER
    raise CheckpointError(f"'{run}' holds no adapter yet (neither adapter/ nor checkpoints/step-*/adapter/)")
