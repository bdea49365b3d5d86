# SPDX-License-Identifier: Apache-2.0
"""The weight path from end to end: real Megatron ranks into real vLLM engines. ``python -m tests.sync`` runs all."""
