# SPDX-License-Identifier: Apache-2.0
"""Read the numbers and expressions that a model answers with."""
