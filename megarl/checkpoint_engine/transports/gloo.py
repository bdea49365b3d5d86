# SPDX-License-Identifier: Apache-2.0
"""Transport over TCP between hosts, from host memory to host memory."""

from typing import Any

from megarl.checkpoint_engine.base import Link
from megarl.checkpoint_engine.transports.collective import Backend, CollectiveReceiver, CollectiveSender, build_gloo

GLOO = Backend("gloo", "cpu", build_gloo)


def open_sender(link: Link) -> CollectiveSender:
    """See ``base.open_sender``."""
    return CollectiveSender(link, GLOO)


def open_receiver(endpoint: dict[str, Any], index: int) -> CollectiveReceiver:
    """See ``base.open_receiver``."""
    return CollectiveReceiver(endpoint, index, GLOO)
