# SPDX-License-Identifier: Apache-2.0
"""Open the store at which the ranks of a group meet, and name it in their environment."""

from datetime import timedelta

from torch.distributed import TCPStore

from megarl.network import LOOPBACK, listen

# torchrun's variables for a group of one process, whose store listens on any free port.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def open_store(address: str = LOOPBACK, timeout_seconds: float = 1800) -> TCPStore:
    """Open a store on a port that the system chooses (its ``port``). It listens as long as it is referred to.

    The port is bound at once: a port that is only found free may belong to another process by the time it is used.

    Args:
        address: this host's address, the only one to listen on. Whoever reaches it can read, write and delete.
        timeout_seconds: seconds that the opener's own reads wait.

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
    """Return torchrun's variables for a rank of a group whose store is open already.

    Args:
        rank: rank of this process over all nodes.
        world_size: number of processes in the group.
        address, port: address and port of the store.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins the store as the others do
    }
