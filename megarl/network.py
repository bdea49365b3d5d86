# SPDX-License-Identifier: Apache-2.0
"""Addresses of this host, and sockets that listen on one of them only.

What listens on all interfaces can be reached by every host of every network that this one is in, and none of torch's
stores or gloo's pairs asks who comes. So on one host all of it listens on loopback, on several on the address by which
they reach each other. Imports no torch.
"""

import contextlib
import ipaddress
import os
import socket

LOOPBACK = "127.0.0.1"
# Beyond any router: the interface of the default route leads there.
OUTWARDS = "10.255.255.255"


def own_address(toward: str = OUTWARDS) -> str:
    """The address of this host by which it reaches ``toward``; loopback where it reaches nothing.

    Not what the host's name resolves to: Debian maps that to 127.0.1.1.

    Args:
        toward: address or name of another host, or of this one.
    """
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((toward, 1))  # UDP: nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return LOOPBACK


def gloo_devices(toward: str = OUTWARDS) -> list[dict[str, str]]:
    """Arguments of ``ProcessGroupGloo.create_device``: the interfaces of GLOO_SOCKET_IFNAME, else one address.

    torch's own choice is what the host's name resolves to: on Debian an address that other hosts cannot reach,
    elsewhere one that they can reach though the whole group is on this host.

    Args:
        toward: where the group's store is, as address or name; one that loopback addresses name keeps all on this host.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        return [{"interface": name} for name in names]
    address = own_address(toward)
    # This host's own name, where that maps to loopback: the others know it by another address.
    if is_loopback(address) and toward not in ("localhost", LOOPBACK):
        address = own_address()
    return [{"hostname": address}]


def listen(address: str) -> socket.socket:
    """A socket that listens on one address of this host, on a port that the system chose.

    Raises:
        OSError: the address is not this host's, or no port is free.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def is_loopback(address: str) -> bool:
    """Whether only this host can reach an IP address."""
    return ipaddress.ip_address(address).is_loopback
