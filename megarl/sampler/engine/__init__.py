# SPDX-License-Identifier: Apache-2.0
"""Choose the settings of vLLM's engine, refuse what it would compute wrongly, and build it."""
