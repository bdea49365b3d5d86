# SPDX-License-Identifier: Apache-2.0
"""PEFT's rules: values and fields of an adapter config, rank and scaling. Imports neither Megatron-Core nor vLLM."""
