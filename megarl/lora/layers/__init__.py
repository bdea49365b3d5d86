# SPDX-License-Identifier: Apache-2.0
"""Adapters around Megatron-Core's linears, routers, experts, embedding and output layer."""
