"""Layers of the model: attention, MLP, experts, norms, and how a config.json becomes GPTModel chunks."""
