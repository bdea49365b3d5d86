# SPDX-License-Identifier: Apache-2.0
"""Transfer over TCP between hosts, from host memory to host memory."""

from megarl.checkpoint_engine.transports.collective import Backend, build_gloo

GLOO = Backend("gloo", "cpu", build_gloo)
open_sender, open_receiver = GLOO.open_sender, GLOO.open_receiver
