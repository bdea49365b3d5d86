# SPDX-License-Identifier: Apache-2.0
"""The order of what rank 0 asks of its own model."""

import threading
from types import SimpleNamespace

from megarl.checkpoint_engine.weight_sync import _AllRanks


class Model:
    """Records what is called; a transfer runs until it is released."""

    def __init__(self) -> None:
        self.done, self.go_on, self.sending = [], threading.Event(), threading.Event()

    def prepare_sync(self, config, receivers):
        self.done.append("prepare")

    def send_weights(self, version, kind):
        self.sending.set()
        assert self.go_on.wait(10)
        self.done.append(f"send {version}")

    def finish_sync(self):
        self.done.append("finish")


def test_a_transfer_ends_before_the_next_connection_is_made_but_can_be_closed_meanwhile():
    model = Model()
    ranks = _AllRanks(model, SimpleNamespace(alone=True, call=lambda method, arguments: 0), 10.0)
    ranks.prepare(None, 1).result(10)
    send = ranks.send(1, "adapter")
    assert model.sending.wait(10)
    ranks.finish().result(10)
    prepare = ranks.prepare(None, 1)
    assert model.done == ["prepare", "finish"] and not prepare.done()
    model.go_on.set()
    prepare.result(10)
    send.result(10)
    assert model.done == ["prepare", "finish", "send 1", "prepare"]
