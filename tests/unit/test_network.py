# SPDX-License-Identifier: Apache-2.0
"""Test the choice of addresses that others can reach, and gloo on loopback only if the whole group is on this host."""

import socket

import psutil
import pytest
import torch.distributed as dist

from megarl.network import gloo_devices, is_loopback, listen, own_address


def test_the_address_outwards_is_one_of_this_hosts_own_whatever_its_name_maps_to() -> None:
    listen(own_address()).close()
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("no such host") == "127.0.0.1"
    mine = {address.address for found in psutil.net_if_addrs().values() for address in found}
    assert own_address() in mine


def test_the_address_by_which_the_cluster_knows_this_host_goes_before_a_route_outwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGARL_NODE_ADDRESS", "10.0.0.9")
    assert own_address() == "10.0.0.9" and own_address("127.0.0.1") == "127.0.0.1"


def test_gloo_listens_where_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert gloo_devices("127.0.0.1") == gloo_devices("localhost") == [{"hostname": "127.0.0.1"}]
    assert gloo_devices(own_address()) == gloo_devices() == [{"hostname": own_address()}]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert gloo_devices() == [{"interface": "lo"}, {"interface": "eth0"}]


def test_a_hosts_own_name_that_maps_to_loopback_does_not_hide_it_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if is_loopback(own_address()):
        pytest.skip("this host has no other address")
    name = socket.gethostname()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.network.own_address", lambda toward=None: "127.0.0.1" if toward == name else "10.0.0.7")
        assert gloo_devices(name) == [{"hostname": "10.0.0.7"}]


def test_gloos_device_of_a_group_on_this_host_is_loopback(tmp_path) -> None:
    before = listening()
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(**each) for each in gloo_devices("127.0.0.1")]
    group = dist.ProcessGroupGloo(dist.FileStore(str(tmp_path / "store"), 1), 0, 1, options)
    assert {place.ip for place in listening() - before} <= {"127.0.0.1"}
    del group


def listening() -> set:
    return {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
