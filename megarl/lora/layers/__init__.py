"""Adapters around Megatron-Core's linears, routers, experts, embedding and output layer."""
