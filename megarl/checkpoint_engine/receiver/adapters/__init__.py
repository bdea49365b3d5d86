# SPDX-License-Identifier: Apache-2.0
"""Hold adapters in vLLM's LoRA slots: plan what goes where, write a version into an idle slot, verify it."""
