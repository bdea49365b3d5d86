# SPDX-License-Identifier: Apache-2.0
"""Measure rollouts: `megarl bench rollout`."""
