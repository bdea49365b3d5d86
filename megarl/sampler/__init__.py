# SPDX-License-Identifier: Apache-2.0
"""vLLM engines that answer from exactly one policy version. Importing it loads no vLLM."""

from megarl.sampler.environment import prepare_environment

__all__ = ["prepare_environment"]
