# SPDX-License-Identifier: Apache-2.0
"""Download models from the Hugging Face hub, and tell their ids from paths."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.config.load import parse_section
from megarl.config.sections.model import ModelConfig
from megarl.errors import ConfigError
from megarl.files import user_path

# ``owner/name``, as the hub spells it.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What trainer and sampler read of a model: weights, configs, tokenizer. Files in subfolders, and Mistral's consolidated
# ones, are other copies of them.
CONFIG_FILES = ("config.json",)
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.tiktoken", "merges.txt", "vocab.txt")
OTHER_FILES = ("*/*", "consolidated*")


def is_hub_id(text: str) -> bool:
    """Return True if a text has the form ``owner/name`` and does not end as a data file does."""
    return HUB_ID.fullmatch(text) is not None and not text.endswith((".jsonl", ".parquet", ".csv", ".json"))


def is_offline() -> bool:
    """Return True if ``HF_HUB_OFFLINE`` forbids the network, by the rule of ``huggingface_hub``."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


@contextmanager
def offline_children() -> Iterator[None]:
    """Keep processes started in this block off the hub; what they need is on this host by then."""
    given = os.environ.get("HF_HUB_OFFLINE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        yield
    finally:
        if given is None:
            os.environ.pop("HF_HUB_OFFLINE", None)


def local_model(path: str, *, config_only: bool = False) -> str:
    """Return the absolute folder of a model, after downloading it if ``path`` is a hub id.

    Called by the driver only. Every other process is given the folder, and asks no hub.

    Args:
        path: ``model.path``: a folder, or the id ``owner/name`` of a model on the hub.
        config_only: ``config.json`` is enough, which checks of the settings read.

    Returns:
        The folder: for a hub id, the snapshot in the hub's cache (``HF_HOME``). A path that is neither a folder nor a
        hub id is returned too; whoever reads it refuses it.

    Raises:
        ConfigError: the path is not valid; or the model is not in the cache and cannot be downloaded.
    """
    folder = user_path("model.path", path)
    if folder.exists() or not is_hub_id(path):
        return str(folder)
    from huggingface_hub import snapshot_download

    offline = is_offline()
    try:
        return snapshot_download(
            path,
            allow_patterns=list(CONFIG_FILES if config_only else MODEL_FILES),
            ignore_patterns=list(OTHER_FILES),
            local_files_only=offline,
        )
    except Exception as error:  # whatever the library raises: network, access, an unknown id, a full disk
        raise ConfigError(f"{_refused(path, offline)}: {type(error).__name__}: {error}") from error


def _refused(path: str, offline: bool) -> str:
    if offline:
        return (
            f"model.path is '{path}', which is not a folder; the hub's cache does not hold a model of this id either, "
            "and HF_HUB_OFFLINE=1 forbids to download it; give a local Hugging Face folder, or set HF_HUB_OFFLINE=0"
        )
    return (
        f"model.path is '{path}', which is not a folder and cannot be loaded from the Hugging Face hub; check the id, "
        "the network and your access to the model (HF_TOKEN), or give a local Hugging Face folder"
    )


def local_section(model: str | Path | ModelConfig | Mapping[str, Any]) -> ModelConfig:
    """Return section ``model`` with its model on this host.

    Args:
        model: a folder, a hub id, or section ``model``.

    Raises:
        ConfigError: see ``parse_section`` and ``local_model``.
    """
    tree = model if isinstance(model, ModelConfig | Mapping) else {"path": str(model)}
    section = parse_section(ModelConfig, "model", tree)
    return section.model_copy(update={"path": local_model(section.path)})
