# SPDX-License-Identifier: Apache-2.0
"""Write base and merged weights into vLLM's parameters, or let vLLM load them."""
