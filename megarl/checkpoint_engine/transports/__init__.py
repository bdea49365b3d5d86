# SPDX-License-Identifier: Apache-2.0
"""Move buckets of bytes from the trainer to the samplers: one module per transport."""
