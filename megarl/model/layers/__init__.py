# SPDX-License-Identifier: Apache-2.0
"""Layers of the model (attention, MLP, experts, norms) and the functions that build GPTModel chunks of them."""
