# SPDX-License-Identifier: Apache-2.0
"""Exchange the job's status between the launchers of all nodes, through the key-value store of the Ray cluster.

``GcsClient`` is what ``ray health-check`` uses. It asks the head directly, without a driver, a local raylet or the
dashboard. It is not public API of Ray; only this file uses it (checked with Ray 2.60).
"""

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from ray._raylet import Config, GcsClient  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import AuthenticationError, RpcError

from megarl.errors import ConfigError, WorkerError

# Time limit of one request to the head, in seconds.
ANSWER_SECONDS = 2
_NAMESPACE = b"megarl"
_STATUS = b"job_status"


def require_token(nodes: int) -> None:
    """Make Ray require a token, or refuse to start. Without a token, whoever reaches a node's ports can run code on it.

    RAY_AUTH_MODE=disabled is the user's statement that nobody else reaches the nodes. A launch of one node makes its
    own token. Several nodes share RAY_AUTH_TOKEN (``scripts/slurm.sbatch`` makes one per job), RAY_AUTH_TOKEN_PATH or
    ~/.ray/auth_token. ``ray start`` uses the file if it is there. A process that is given an address, such as the job,
    does not; it needs the RAY_AUTH_MODE that this function sets in ``os.environ``.

    Raises:
        ConfigError: several nodes have no token, or other users can read the file.
    """
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return
    if nodes == 1 and not os.environ.get("RAY_AUTH_TOKEN"):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if not os.environ.get("RAY_AUTH_TOKEN"):
        os.environ.pop("RAY_AUTH_TOKEN", None)  # the variable is set, but empty
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not os.environ.get("RAY_AUTH_TOKEN"):
        if not file.is_file():
            raise ConfigError(
                "there is no Ray token, without which anybody who reaches these nodes could run code on them: make one "
                f"with `(umask 077; mkdir -p ~/.ray; openssl rand -hex 32 > ~/.ray/auth_token)` as {file} on every "
                "node, or set the same RAY_AUTH_TOKEN on all of them; RAY_AUTH_MODE=disabled if nobody else can reach "
                "their network"
            )
        _hide(file)
    os.environ["RAY_AUTH_MODE"] = "token"
    Config.initialize("")  # Ray read the setting when it was imported


def _hide(file: Path) -> None:
    """Make a token unreadable for other users. Ray itself makes it readable for all."""
    mode = file.stat().st_mode & 0o777
    if mode & 0o077:
        try:
            file.chmod(0o600)
        except OSError as error:
            raise ConfigError(f"other users can read the Ray token {file} (mode {mode:o}): chmod 600 it") from error


class HeadUnreachableError(WorkerError):
    """The head of the Ray cluster does not answer at present."""


class Cluster:
    """The Ray cluster whose head answers at ``host:port``.

    Every method raises ``HeadUnreachableError``, or ``WorkerError`` if this node's token is not the head's.
    """

    def __init__(self, address: str) -> None:
        """Connect. Blocks for up to 40 s if nothing answers, so check the port first (``answers``)."""
        self._address = address
        with self._asking():
            self._client = GcsClient(address=address)

    def alive_nodes(self) -> list[str]:
        """Return the addresses of the nodes that have joined and not left."""
        with self._asking():
            nodes = self._client.get_all_node_info(timeout=ANSWER_SECONDS).values()
        return sorted(node.node_manager_address for node in nodes if node.state == GcsNodeInfo.ALIVE)

    def announce(self, status: int) -> None:
        """Tell every node that the job has ended with exit status ``status``."""
        value = str(status).encode()
        with self._asking():
            self._client.internal_kv_put(_STATUS, value, True, namespace=_NAMESPACE, timeout=ANSWER_SECONDS)

    def job_status(self) -> int | None:
        """Return the job's exit status, or None if it has not ended."""
        with self._asking():
            value = self._client.internal_kv_get(_STATUS, namespace=_NAMESPACE, timeout=ANSWER_SECONDS)
        return None if value is None else int(value)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except AuthenticationError as error:
            raise WorkerError(
                f"the head at {self._address} does not accept this node's Ray token: give every node the head's "
                "~/.ray/auth_token (or RAY_AUTH_TOKEN), or set RAY_AUTH_MODE=disabled on all of them if nobody else "
                "can reach their network"
            ) from error
        except RpcError as error:
            raise HeadUnreachableError(f"no Ray head answers at {self._address}: {error}") from error


def answers(host: str, port: int) -> bool:
    """Return True if something listens at ``host:port``."""
    try:
        with socket.create_connection((host, port), timeout=ANSWER_SECONDS):
            return True
    except OSError:
        return False
