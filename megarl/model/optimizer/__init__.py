# SPDX-License-Identifier: Apache-2.0
"""Optimizer of an adapter: Megatron-Core's optimizer, its shards by tensor name, a fused AdamW update."""
