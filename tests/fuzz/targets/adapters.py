# SPDX-License-Identifier: Apache-2.0
"""PEFT folders of adapters: a named error, or the same update of every weight as PEFT makes."""

import json
import shutil
from pathlib import Path
from random import Random

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from megarl.config import parse_config
from megarl.errors import MegarlError
from megarl.lora import attach, load_peft_config
from megarl.model.megatron_model import MegatronModel
from megarl.parallel.device import pick_device
from megarl.parallel.groups import init_groups
from megarl.verify.inputs.adapters import make_adapter
from tests.fuzz.harness import Mutation, WrongResult
from tests.fuzz.mutate import bytes_of, json_of, safetensors_of
from tests.helpers.models import make_model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Adapters:
    """An adapter whose config uses every field, on a dense model of two layers."""

    def make(self, folder: Path) -> None:
        self.path = make_model(folder.parent / "model", "qwen3", tied=True, num_hidden_layers=2)
        settings = {"target_modules": ["q_proj", "v_proj", "down_proj"], "rank_pattern": {"v_proj": 2}, "seed": 3}
        make_adapter(self.path, folder / "adapter", alpha_pattern={"layers.0.mlp.down_proj": 3}, **settings)
        self.config = parse_config(
            {
                "model": {"path": str(self.path), "dtype": "float32"},
                "task": {"name": "arithmetic"},
                "sampler": {"max_prompt_tokens": 24, "max_response_tokens": 24},
            }
        )
        self.groups = init_groups(self.config.parallel, pick_device("auto"), seed=5)

    def mutate(self, folder: Path, draw: Random) -> Mutation:
        adapter = folder / "adapter"
        kind = draw.choice(["json", "json", "json", "tensors", "tensors", "bytes", "folder"])
        if kind == "json":
            return json_of(adapter / CONFIG, draw)
        if kind == "tensors":
            return safetensors_of(adapter / WEIGHTS, draw)
        if kind == "bytes":
            return bytes_of(adapter / draw.choice([CONFIG, WEIGHTS]), draw)
        case = draw.choice(["gone", "file", "bin"])
        if case == "bin":
            (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
        else:
            shutil.rmtree(adapter)
            if case == "file":
                adapter.write_text("")
        return Mutation(f"folder: {case}")

    def check(self, folder: Path) -> None:
        adapter = folder / "adapter"
        # As a trainer rank does with lora.init_from.
        model = MegatronModel(self.config.trainer, self.groups, attach(load_peft_config(adapter), seed=1))
        model.load_adapter(adapter)
        merged = {name: tensor.clone() for name, tensor in model.export_merged()}
        for name, expected in self._merged_by_peft(adapter).items():
            if name not in merged and name == "lm_head.weight":  # tied
                continue
            if not torch.allclose(merged[name], expected, rtol=1e-4, atol=1e-5, equal_nan=True):
                raise WrongResult(f"'{name}' is off by {(merged[name] - expected).abs().max():.3g} from PEFT's")

    def _merged_by_peft(self, adapter: Path) -> dict[str, torch.Tensor]:
        try:
            base = AutoModelForCausalLM.from_pretrained(self.path)
            merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
        except MegarlError:
            raise
        except Exception as error:
            settings = json.loads((adapter / CONFIG).read_text())
            raise WrongResult(f"PEFT refuses it ({type(error).__name__}: {error}): {settings}") from error
        return dict(merged.state_dict())
