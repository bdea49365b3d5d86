# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of both back ends: routers, the way of tokens to experts and back, experts, their spec."""
