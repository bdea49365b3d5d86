# SPDX-License-Identifier: Apache-2.0
"""Shared memory that damages one byte of every bucket after its digests were taken."""

import torch

from megarl.checkpoint_engine.base import Link
from megarl.checkpoint_engine.shm import ShmSender


class FlippingSender(ShmSender):
    """Flips the lowest bit of the bucket's 101st byte."""

    def put(self, header: bytes, payload: torch.Tensor) -> None:
        payload[100] ^= 1
        super().put(header, payload)


def open_sender(link: Link) -> FlippingSender:
    """See ``base.open_sender``; receivers take it for plain shm."""
    return FlippingSender(link)
