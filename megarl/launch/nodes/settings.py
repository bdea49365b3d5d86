# SPDX-License-Identifier: Apache-2.0
"""Read and check the environment of ``scripts/launch_node.sh``, before anything is started. Imports no Ray."""

import errno
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import ConfigError
from megarl.network import is_loopback, own_address

DEFAULT_PORT = 6379
DEFAULT_JOIN_TIMEOUT = 300
DEFAULT_JOB_GRACE = 40


@dataclass(frozen=True)
class NodeSettings:
    """Settings of one node.

    Attributes:
        rank: NODE_RANK; 0 is the head.
        nodes: NNODES, the number of nodes.
        head: HEAD_ADDR as given.
        host_ip: the IPv4 address that ``head`` resolves to.
        port: HEAD_PORT, the port of Ray's head.
        join_timeout: JOIN_TIMEOUT, the seconds to wait for the head and for all nodes.
        job_grace: JOB_GRACE, the seconds that the job may take to end after a signal: it saves a checkpoint.
        cpus: NODE_CPUS, the number of CPUs that Ray uses on this node; None for all that Ray finds.
        gpus: NODE_GPUS, likewise for GPUs.
        command: command that the head runs when all nodes are there.
    """

    rank: int
    nodes: int
    head: str
    host_ip: str
    port: int
    join_timeout: float
    job_grace: float
    cpus: int | None
    gpus: int | None
    command: tuple[str, ...]

    @property
    def address(self) -> str:
        """The head's ``ip:port``."""
        return f"{self.host_ip}:{self.port}"


def read_settings(environment: Mapping[str, str], arguments: Sequence[str]) -> NodeSettings:
    """Check the environment and the arguments.

    Args:
        environment: the environment variables. NODE_RANK, NNODES and HEAD_ADDR are required.
        arguments: ``RECIPE.yaml [key=value ...]`` for ``megarl train``, or ``-- COMMAND [ARGUMENT ...]``.

    Raises:
        ConfigError: a variable is wrong; the message names it, its value and what is allowed.
    """
    nodes = _integer(environment, "NNODES", 1)
    rank = _integer(environment, "NODE_RANK", 0, nodes - 1)
    head = environment.get("HEAD_ADDR", "")
    if not head:
        raise ConfigError("HEAD_ADDR is not set; it must be the name or address of the node with NODE_RANK=0")
    host_ip = _resolve(head)
    if nodes > 1 and is_loopback(host_ip) and environment.get("NODES_ON_THIS_HOST") != "1":
        raise ConfigError(
            f"HEAD_ADDR is '{head}', which is {host_ip} here, an address that only this host reaches, but NNODES is "
            f"{nodes}; give the address of rank 0 in the nodes' network (here {own_address()}), the same on every node "
            "(NODES_ON_THIS_HOST=1 if all of them are on this host)"
        )
    port = _integer(environment, "HEAD_PORT", 1024, 65535, DEFAULT_PORT)
    if rank == 0:
        _check_head_address(head, host_ip, port)
    return NodeSettings(
        rank=rank,
        nodes=nodes,
        head=head,
        host_ip=host_ip,
        port=port,
        join_timeout=_integer(environment, "JOIN_TIMEOUT", 1, default=DEFAULT_JOIN_TIMEOUT),
        job_grace=_integer(environment, "JOB_GRACE", 1, default=DEFAULT_JOB_GRACE),
        cpus=_integer(environment, "NODE_CPUS", 0) if environment.get("NODE_CPUS") else None,
        gpus=_integer(environment, "NODE_GPUS", 0) if environment.get("NODE_GPUS") else None,
        command=_command(arguments),
    )


def _integer(
    environment: Mapping[str, str], name: str, low: int, high: int | None = None, default: int | None = None
) -> int:
    """Read an integer within ``low..high`` from the environment."""
    text = environment.get(name, "")
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if not text and default is not None:
        return default
    if not text:
        raise ConfigError(f"{name} is not set; it must be {allowed}")
    value = int(text) if text.isascii() and text.isdigit() else low - 1
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{name} is '{text}'; it must be {allowed}")
    return value


def _resolve(head: str) -> str:
    try:
        return socket.getaddrinfo(head, None, socket.AF_INET)[0][4][0]  # type: ignore[return-value]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"HEAD_ADDR is '{head}', which does not resolve to an IPv4 address: {error}") from error


def _check_head_address(head: str, host_ip: str, port: int) -> None:
    """Check that rank 0 can listen there: the address is its own and the port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host_ip, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"HEAD_PORT {port} is in use on this node (another Ray cluster?); end it, or set HEAD_PORT to "
                    "another port, the same on every node"
                ) from error
            raise ConfigError(
                f"HEAD_ADDR is '{head}' ({host_ip}), which is not an address of this node, but NODE_RANK is 0; "
                "HEAD_ADDR must be the address of rank 0, the same on every node"
            ) from error


def _command(arguments: Sequence[str]) -> tuple[str, ...]:
    if not arguments or arguments == ["--"]:
        raise ConfigError("no job given; name a recipe: launch_node.sh RECIPE.yaml [key=value ...]")
    if arguments[0] == "--":
        if shutil.which(arguments[1]) is None:
            raise ConfigError(f"the job's command '{arguments[1]}' is not a program on this node")
        return tuple(arguments[1:])
    if not Path(arguments[0]).expanduser().is_file():
        raise ConfigError(f"recipe '{arguments[0]}' does not exist on this node (working folder {Path.cwd()})")
    return (sys.executable, "-m", "megarl.cli.main", "train", *arguments)
