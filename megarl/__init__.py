"""LoRA reinforcement learning on Megatron-Core with vLLM sampling. See README.md."""

__version__ = "0.1.0"
