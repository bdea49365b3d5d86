"""Reading ``adapter_config.json``."""

import pytest
from peft import LoraConfig

from megarl.lora import load_peft_config


@pytest.mark.parametrize(
    ("start", "kept"),
    [(True, True), (False, True), ("gaussian", True), ("orthogonal", True), ("pissa", "pissa"), ("olora", "olora")],
)
def test_a_start_is_kept_only_where_it_changed_the_base(tmp_path, start, kept):
    LoraConfig(target_modules=["q_proj"], init_lora_weights=start).save_pretrained(tmp_path)
    assert load_peft_config(tmp_path).init_lora_weights == kept
