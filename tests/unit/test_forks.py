# SPDX-License-Identifier: Apache-2.0
"""A fork server whose imports have not initialised CUDA serves processes that can."""

import multiprocessing
from typing import Any

import torch

from megarl import forks


def test_an_open_device_is_seen_also_by_a_forked_process(tmp_path) -> None:
    device = tmp_path / "nvidia-uvm"
    assert not forks.opened((str(device),))
    with device.open("w"):
        assert forks.opened((str(tmp_path / "nvidia"),)) and not forks.opened(("/dev/nowhere",))
        seen = multiprocessing.get_context("fork").Process(target=_exit_if, args=(str(device),))
        seen.start()
        seen.join()
        assert seen.exitcode == 3
    assert not forks.opened((str(device),))


def _exit_if(path: str) -> None:
    raise SystemExit(3 if forks.opened((path,)) else 0)


def test_a_tensor_is_tried_only_if_the_server_has_a_device_open(monkeypatch) -> None:
    def refuse(*given: Any, **how: Any) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "zeros", refuse)
    for there, is_open, status in (("/dev/null", False, None), ("/dev/null", True, 1), ("/dev/nowhere", False, 1)):
        monkeypatch.setattr(forks, "DEVICES", (there,))
        monkeypatch.setattr(forks, "opened", lambda prefixes, is_open=is_open: is_open)
        try:
            forks._try_gpu()
            found = None
        except SystemExit as ended:
            found = ended.code
        assert found == status
