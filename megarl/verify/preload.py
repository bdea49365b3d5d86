"""Imported once by the fork server, so that ranks do not each spend ten seconds importing."""

import warnings

warnings.simplefilter("ignore")

import transformers  # noqa: E402, F401
from transformers import AutoModelForCausalLM  # noqa: E402, F401

import megarl.lora  # noqa: E402
import megarl.model.megatron_model  # noqa: E402, F401
