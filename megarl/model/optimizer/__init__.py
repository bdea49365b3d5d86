# SPDX-License-Identifier: Apache-2.0
"""The adapter's optimizer: Megatron-Core's, its shards by tensor name, the fused AdamW update."""
