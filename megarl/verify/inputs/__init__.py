# SPDX-License-Identifier: Apache-2.0
"""Inputs of `megarl verify`: arguments, layouts, token sequences, random adapters and tiny models."""
