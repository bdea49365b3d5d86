# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: a named error, or the logprobs that transformers computes with the same folder."""

import warnings
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.config import ParallelConfig, check_run, parse_config
from megarl.launch.run import prepare_task
from megarl.model.inspection import inspect_folder
from megarl.parallel.device import pick_device
from megarl.parallel.groups import init_groups
from megarl.sampler.engine.settings import stop_tokens
from megarl.verify.inputs.samples import make_samples
from megarl.verify.inputs.settings import verify_tree
from megarl.verify.inputs.tiny_model import write_random
from megarl.verify.reference.hf_peft import all_logprobs
from tests.fuzz.harness import Mutation, WrongResult
from tests.fuzz.mutate import bytes_of, json_of, safetensors_of
from tests.helpers.models import FAMILIES, SHAPE, rope

# Families whose config.json have between them every key that megarl reads. Each case changes one of them.
MODELS = {
    "llama": {"rope_parameters": rope("llama3"), "attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "deepseek_v3": {},
}
CHOSEN = "chosen"
LARGEST = 1e-3


class Folders:
    """A folder of each family, through the checks of `megarl train` and into the trainer's model."""

    def make(self, folder: Path) -> None:
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        self.groups = init_groups(ParallelConfig(), pick_device("auto"))
        for family, changes in MODELS.items():
            config_class, extra = FAMILIES[family]
            vocab = make_tokenizer(folder / family)
            tied = {"tie_word_embeddings": family == "qwen2"}
            config = config_class(
                **{**SHAPE, **extra, **changes, **tied, "num_hidden_layers": 2, "vocab_size": vocab, "eos_token_id": 0}
            )
            write_random(config, folder / family)
        (folder / CHOSEN).write_text("llama")

    def mutate(self, folder: Path, draw: Random) -> Mutation:
        family = draw.choice(list(MODELS))
        (folder / CHOSEN).write_text(family)
        model = folder / family
        kind = draw.choice(["config"] * 6 + ["weights", "weights", "bytes", "others"])
        if kind == "config":
            mutation = json_of(model / "config.json", draw)
        elif kind == "weights":
            mutation = safetensors_of(model / "model.safetensors", draw)
        else:
            files = sorted(model.iterdir()) if kind == "bytes" else [model / "generation_config.json"]
            mutation = (bytes_of if kind == "bytes" else json_of)(draw.choice(files), draw)
        return Mutation(f"{family}/{mutation.what}", mutation.names)

    def check(self, folder: Path) -> None:
        path = folder / (folder / CHOSEN).read_text()
        tree = verify_tree(path)
        tree["task"]["options"] = {"size": 20}
        config = parse_config(tree)
        check_run(config)
        inspect_folder(path, config.parallel)
        stop_tokens(str(path))
        prepare_task(config, folder)
        logprobs = self._logprobs(config)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            )
            expected = all_logprobs(model, self._samples(config), config.sampler.temperature)
        except Exception as error:
            raise WrongResult(f"transformers refuses it: {error!r}") from error
        worst = max(abs(ours - theirs).max() for ours, theirs in zip(logprobs, expected, strict=True))
        # Damaged weights can be of any size, and so can the logprobs.
        if not worst < LARGEST * max(1.0, *(abs(theirs).max() for theirs in expected)):
            raise WrongResult(f"logprobs differ from transformers' by {worst:.3g}")

    def _logprobs(self, config):
        from peft import LoraConfig

        from megarl.lora import attach
        from megarl.model.megatron_model import MegatronModel

        lora = LoraConfig(r=1, target_modules=["o_proj"])
        model = MegatronModel(config.trainer, self.groups, attach(lora))
        return model.forward(model.pack(self._samples(config)), adapter=False)

    def _samples(self, config):
        return make_samples(4, 100)
