# SPDX-License-Identifier: Apache-2.0
"""Find addresses of this host, and listen on one of them only.

A socket that listens on all interfaces can be reached from every network that the host is in, and neither torch's
stores nor gloo's pairs authenticate peers. On one host everything therefore listens on loopback; on several hosts, on
the address by which they reach each other. Imports no torch.
"""

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
# Addresses behind a router: the interface of the default route leads there.
OUTWARDS = "10.255.255.255"
OUTWARDS6 = "2001:db8::1"
# Variable with the address by which the other nodes of a cluster know this one. A cluster may have no route outwards.
ADDRESS = "MEGARL_NODE_ADDRESS"


def boot_id() -> str:
    """Return what names this host since its last boot, in all of its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def own_address(toward: str = OUTWARDS) -> str:
    """Return the address by which this host reaches ``toward``; loopback if it cannot reach it.

    The host's name is not resolved for this, because Debian maps it to 127.0.1.1. Without ``toward`` it is the one that
    ``MEGARL_NODE_ADDRESS`` names, if that is set.

    Args:
        toward: address or name of another host, or of this one.
    """
    if toward == OUTWARDS and (known := os.environ.get(ADDRESS)):
        return known
    # A host without a route of IPv4 is reached by IPv6.
    for family, target in ((_family(toward), toward), (socket.AF_INET6, OUTWARDS6)):
        with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe, contextlib.suppress(OSError):
            probe.connect((target, 1))  # UDP: nothing is sent
            return probe.getsockname()[0]
        if toward != OUTWARDS:
            break
    return LOOPBACK


def gloo_devices(toward: str = OUTWARDS) -> list[dict[str, str]]:
    """Return arguments of ``ProcessGroupGloo.create_device``: the interfaces of GLOO_SOCKET_IFNAME, else one address.

    torch itself would resolve the host's name. On Debian that gives an address that other hosts cannot reach; elsewhere
    it gives one that they can reach even if the whole group is on this host.

    Args:
        toward: address or name of the group's store. If it is a loopback address, everything stays on this host.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        return [{"interface": name} for name in names]
    address = own_address(toward)
    # The host's own name may map to loopback; other hosts know it by another address.
    if is_loopback(address) and toward not in ("localhost", LOOPBACK):
        address = own_address()
    return [{"hostname": address}]


def listen(address: str) -> socket.socket:
    """Return a socket that listens on one address of this host, on a port that the system chose.

    Raises:
        OSError: the address is not this host's, or no port is free.
    """
    listener = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """Return a connection to a listener; ``host`` may be a name or an address of IPv4 or IPv6. Raises ``OSError``."""
    return socket.create_connection((host, port), timeout)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(address: str) -> bool:
    """Return True if only this host can reach an IP address."""
    return ipaddress.ip_address(address).is_loopback
