# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a group meet."""

from datetime import timedelta

from torch.distributed import TCPStore

from megarl.network import LOOPBACK, listen

# What torchrun sets for a group of one process, whose store listens on any port.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def open_store(address: str = LOOPBACK, timeout_seconds: float = 1800) -> TCPStore:
    """A store that listens from now on, on a port that the system chose (its ``port``), as long as it is referred to.

    A port that is only found free now and listened on later can be another process's by then.

    Args:
        address: of this host, the only one to listen on: whoever reaches it can read, write and delete.
        timeout_seconds: how long the opener's own reads may wait.

    Raises:
        OSError: the address is not this host's, or no port can be opened.
    """
    listener = listen(address)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=listener.detach(),  # the store closes it
    )


def rank_environment(rank: int, world_size: int, address: str, port: int) -> dict[str, str]:
    """What torchrun sets for a rank of a group that meets at a store which is open already.

    Args:
        rank: of this process, counted over all nodes.
        world_size: processes in the group.
        address, port: the store's.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins the store as the others do
    }
