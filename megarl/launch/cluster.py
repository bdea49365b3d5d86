"""What one node's launcher and another's tell each other, through the cluster's own key-value store.

``GcsClient`` is what ``ray health-check`` uses: it asks the head directly, without a driver, a local raylet or the
dashboard. It is not public API of Ray; this file is the only one that touches it (checked with Ray 2.60).
"""

import contextlib
import socket
from collections.abc import Iterator

from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import AuthenticationError, RpcError

from megarl.errors import WorkerError

# Seconds that one question to the head may take.
ANSWER_SECONDS = 2
_NAMESPACE = b"megarl"
_STATUS = b"job_status"


def follow_token_setting() -> None:
    """Use token authentication where this user has a Ray token, unless RAY_AUTH_MODE says otherwise.

    ``ray start`` does the same, but a process that is given an address, such as the job, does not: it needs the
    RAY_AUTH_MODE that this sets in ``os.environ``. A local ``ray.init()`` makes a token, so most users have one.
    """
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


class HeadUnreachableError(WorkerError):
    """The head of the Ray cluster does not answer (now)."""


class Cluster:
    """The Ray cluster whose head answers at ``host:port``.

    Every method raises ``HeadUnreachableError``, or ``WorkerError`` when this node's token is not the head's.
    """

    def __init__(self, address: str) -> None:
        """Connect; blocks for up to 40 s when nothing answers, so check the port first (``answers``)."""
        self._address = address
        with self._asking():
            self._client = GcsClient(address=address)

    def alive_nodes(self) -> list[str]:
        """Addresses of the nodes that have joined and not left."""
        with self._asking():
            nodes = self._client.get_all_node_info(timeout=ANSWER_SECONDS).values()
        return sorted(node.node_manager_address for node in nodes if node.state == GcsNodeInfo.ALIVE)

    def announce(self, status: int) -> None:
        """Tell every node that the job has ended with exit status ``status``."""
        value = str(status).encode()
        with self._asking():
            self._client.internal_kv_put(_STATUS, value, True, namespace=_NAMESPACE, timeout=ANSWER_SECONDS)

    def job_status(self) -> int | None:
        """Exit status of the job, or None while it has not ended."""
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
    """True when something listens at ``host:port``."""
    try:
        with socket.create_connection((host, port), timeout=ANSWER_SECONDS):
            return True
    except OSError:
        return False
