# SPDX-License-Identifier: Apache-2.0
"""Check a Hugging Face folder before any rank is started: its config, the layout, the names of its tensors."""

from pathlib import Path

from megarl.config import ParallelConfig
from megarl.config.checks import check_layout_fits_model
from megarl.families import family_of
from megarl.model.layers.attention.rope import rope_of
from megarl.model.weights.full_config import FullConfig, names_of
from megarl.model.weights.hf_folder import WeightFolder, read_config


def inspect_folder(path: str | Path, parallel: ParallelConfig) -> FullConfig:
    """Check a model's folder without reading weights, and return its completed config.

    Raises:
        ConfigError: the layout does not divide the model.
        ModelError: the folder is damaged or incomplete, or its files do not fit each other.
        UnsupportedError: the model is not supported; the message names the setting.
    """
    hf_config = read_config(path)
    family = family_of(hf_config)
    family.settings(hf_config)
    for layer in range(hf_config["num_hidden_layers"]):
        family.window(hf_config, layer)
    rope_of(hf_config)
    check_layout_fits_model(parallel, hf_config)
    WeightFolder(path).check_names(names_of(hf_config))
    return hf_config
