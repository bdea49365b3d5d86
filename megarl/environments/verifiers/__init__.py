# SPDX-License-Identifier: Apache-2.0
"""Environments of the package verifiers, played in a process with a Python of its own."""
