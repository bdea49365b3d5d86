"""Run a function on several gloo ranks, in processes forked from one that has done the imports."""

import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call ``function(*args)`` on every rank of a new group; returns the ranks' results in order.

    The function must be importable. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as torchrun does.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        # A process forked after CUDA was looked at cannot use it.
        start_method = "spawn" if torch.cuda.is_available() else "forkserver"
        mp.set_forkserver_preload(["tests.helpers.preload"])
        mp.start_processes(
            _enter, (function, world_size, port, folder, args), nprocs=world_size, join=True, start_method=start_method
        )
        return [pickle.loads((Path(folder) / f"{rank}.pkl").read_bytes()) for rank in range(world_size)]


def _enter(rank: int, function: Callable[..., Any], world_size: int, port: int, folder: str, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    result = function(*args)
    (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps(result))
