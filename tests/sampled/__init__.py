# SPDX-License-Identifier: Apache-2.0
"""Train every tested architecture of model.backend=transformers against real vLLM (`python -m tests.sampled`)."""
