# SPDX-License-Identifier: Apache-2.0
"""Test ``model.backend: transformers`` against plain PEFT and against ``MegatronModel``."""
