# SPDX-License-Identifier: Apache-2.0
"""Send weights from the trainer to the samplers: a protocol, its transports, and both ends."""
