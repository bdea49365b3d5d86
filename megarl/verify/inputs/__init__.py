# SPDX-License-Identifier: Apache-2.0
"""What is verified: the arguments, layouts, token sequences, random adapters and tiny models."""
