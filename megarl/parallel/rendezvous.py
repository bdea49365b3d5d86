"""Where the ranks of a group meet."""

from datetime import timedelta

from torch.distributed import TCPStore

# What torchrun sets for a group of one process, whose store listens on any port.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def open_store(timeout_seconds: float = 1800) -> TCPStore:
    """A store that listens from now on, on a port that the system chose (its ``port``), as long as it is referred to.

    A port that is only found free now and listened on later can be another process's by then.

    Args:
        timeout_seconds: how long the opener's own reads may wait.

    Raises:
        RuntimeError: no port can be opened.
    """
    timeout = timedelta(seconds=timeout_seconds)
    return TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timeout)


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
