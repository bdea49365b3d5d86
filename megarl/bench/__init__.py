# SPDX-License-Identifier: Apache-2.0
"""Measure speed and memory of a training step beside Hugging Face + PEFT on the same batch (`megarl bench train`)."""
