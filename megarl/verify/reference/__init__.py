# SPDX-License-Identifier: Apache-2.0
"""The reference: one process of Hugging Face + PEFT in float64, and the loss that both sides use."""
