# SPDX-License-Identifier: Apache-2.0
"""Import what the ranks need. The fork server does this once, so that each rank saves ten seconds."""

import os
import warnings

# Counting GPUs through the CUDA runtime would initialise it here, and forked processes could not use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
warnings.simplefilter("ignore")

import transformers  # noqa: E402, F401
from transformers import AutoModelForCausalLM  # noqa: E402, F401

import megarl.lora  # noqa: E402
import megarl.model.megatron_model  # noqa: E402, F401
