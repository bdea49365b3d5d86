# SPDX-License-Identifier: Apache-2.0
"""Check that whatever uses a rank's model waits for a transfer, which comes over another connection."""

import threading

import pytest

from megarl.controller.actors.trainer import TrainerRank

IN_TURN = {
    "forward": ([],),
    "forward_backward": ([], [], True),
    "optim_step": (0.1,),
    "save_checkpoint": ("", {}),
    "load_checkpoint": ("",),
    "save_adapter": ("",),
    "score": ([],),
    "prepare_sync": (),
    "send_weights": (),
    "finish_sync": (),
}


@pytest.mark.parametrize("method", IN_TURN)
def test_a_method_waits_for_its_turn(method: str) -> None:
    rank = TrainerRank.__new__(TrainerRank)
    rank.turn = threading.Lock()
    ended = threading.Event()

    def call() -> None:
        with pytest.raises((AttributeError, ValueError)):  # it has no model
            getattr(rank, method)(*IN_TURN[method])
        ended.set()

    with rank.turn:
        threading.Thread(target=call, daemon=True).start()
        assert not ended.wait(0.1)
    assert ended.wait(60.0)
