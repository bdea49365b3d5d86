"""LoRA reinforcement learning on Megatron-Core with vLLM sampling. See README.md."""

from megarl.torch_addons import hide_cuda_addons

__version__ = "0.1.0"

hide_cuda_addons()
