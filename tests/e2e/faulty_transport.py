# SPDX-License-Identifier: Apache-2.0
"""Shared memory that damages one byte of every bucket after its digests are computed."""

import torch

from megarl.checkpoint_engine.base import Link
from megarl.checkpoint_engine.transports.shm import ShmSender


class FlippingSender(ShmSender):
    """Flips the lowest bit of the bucket's 101st byte."""

    def put(self, header: bytes, payload: torch.Tensor) -> None:
        payload[100] ^= 1
        super().put(header, payload)


def open_sender(link: Link) -> FlippingSender:
    """Open the sender; see ``base.open_sender``. Receivers treat it as plain shm."""
    return FlippingSender(link)
