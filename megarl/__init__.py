"""LoRA reinforcement learning on Megatron-Core with vLLM sampling. See README.md."""
