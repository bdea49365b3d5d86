# SPDX-License-Identifier: Apache-2.0
"""Test a group's store: its port is taken from the moment it is known, and every rank can meet there."""

import errno
import os
import socket

import psutil
import pytest
import torch
import torch.distributed as dist

from megarl.network import LOOPBACK
from megarl.parallel.rendezvous import open_store, rank_environment


def total() -> int:
    """Return the sum of all ranks' numbers, by a collective."""
    dist.init_process_group("gloo")
    mine = torch.tensor(int(os.environ["RANK"]))
    dist.all_reduce(mine)
    dist.destroy_process_group()
    return int(mine)


def test_nobody_else_can_listen_on_the_port() -> None:
    store = open_store()
    with socket.socket() as other, pytest.raises(OSError) as caught:
        other.bind((LOOPBACK, store.port))
    assert caught.value.errno == errno.EADDRINUSE


def test_a_store_can_be_reached_at_its_address_only() -> None:
    store = open_store()
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {place.ip for place in listening if place.port == store.port} == {"127.0.0.1"}
    elsewhere = socket.create_server(("127.0.0.2", store.port))  # would fail if the store listened on all addresses
    elsewhere.close()
    with pytest.raises(OSError):
        open_store("192.0.2.77")


def test_rank_0_joins_a_store_that_is_open_already(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    for name, value in rank_environment(0, 1, "127.0.0.1", store.port).items():
        monkeypatch.setenv(name, value)
    assert total() == 0
    # The group's keys are in it; another store would have none.
    assert store.num_keys() > 1
