# SPDX-License-Identifier: Apache-2.0
"""Imported once by the fork server, so that ranks do not each spend ten seconds importing."""

import os
import warnings

# Looking for GPUs by CUDA's own runtime would start it here, and forked processes could not use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
warnings.simplefilter("ignore")

import transformers  # noqa: E402, F401
from transformers import AutoModelForCausalLM  # noqa: E402, F401

import megarl.lora  # noqa: E402
import megarl.model.megatron_model  # noqa: E402, F401
