# SPDX-License-Identifier: Apache-2.0
"""Check the run config's ``lora`` section against a model, before anything is built."""

from peft import LoraConfig

from megarl.config.sections.lora import LoraConfig as LoraSection
from megarl.families import WeightMap
from megarl.lora.files.peft_folder import load_peft_config
from megarl.lora.targets.parameters import as_peft_reads
from megarl.lora.targets.resolve import resolve_targets
from megarl.peft.rules import check_supported
from megarl.peft.values import check_patterns


def check_section(section: LoraSection, weights: WeightMap) -> None:
    """Refuse an adapter that the model cannot have.

    Raises:
        AdapterError: a target or a pattern matches nothing, or a file cannot be read.
        UnsupportedError: a setting is not supported.
    """
    if section.init_from:
        resolve_targets(load_peft_config(section.init_from), weights)
        return
    config = LoraConfig(**section.peft_settings())
    check_supported(config)
    check_patterns(as_peft_reads(config, weights), set(resolve_targets(config, weights).values()))
