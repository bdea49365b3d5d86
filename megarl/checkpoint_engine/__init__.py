# SPDX-License-Identifier: Apache-2.0
"""The weight path from trainer to sampler: a protocol, its transports, and both ends."""
