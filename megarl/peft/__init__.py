# SPDX-License-Identifier: Apache-2.0
"""PEFT's rules: values and fields of an adapter config, rank and scaling. Free of Megatron-Core and of vLLM."""
