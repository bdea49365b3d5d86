# SPDX-License-Identifier: Apache-2.0
"""Attend within packed sequences: masks, context parallelism, RoPE; what TE, SDPA and flash attention compute."""
