# SPDX-License-Identifier: Apache-2.0
"""Adapter layers around Megatron-Core's linears, routers, experts, embedding and output layer."""
