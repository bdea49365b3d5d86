"""Reading ``adapter_config.json``."""

import pytest
from peft import LoraConfig

from megarl.errors import UnsupportedError
from megarl.lora import load_peft_config


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "eva"])
def test_a_start_that_left_the_base_alone_is_forgotten(tmp_path, start):
    LoraConfig(target_modules=["q_proj"], init_lora_weights=start).save_pretrained(tmp_path)
    assert load_peft_config(tmp_path).init_lora_weights is True


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_a_start_that_changed_the_base_is_refused_with_the_way_out(tmp_path, start):
    LoraConfig(target_modules=["q_proj"], init_lora_weights=start).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=f"init_lora_weights is '{start}'.*path_initial_model_for_weight_conv"):
        load_peft_config(tmp_path)
