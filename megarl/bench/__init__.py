# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of a training step, measured beside Hugging Face + PEFT on the same batch (`megarl bench train`)."""
