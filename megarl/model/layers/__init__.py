# SPDX-License-Identifier: Apache-2.0
"""Layers of the model: attention, MLP, experts, norms, and how a config.json becomes GPTModel chunks."""
