# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks, in processes forked from one that has done the imports."""

import functools
import gc
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from megarl.errors import MegarlError, WorkerError
from megarl.forks import forks_have_gpus
from megarl.parallel.rendezvous import open_store, rank_environment

# Modules that the fork server imports before the first rank.
PRELOAD = ["megarl.verify.preload"]
# Queue for lines of progress, in a rank's process.
_progress_queue: Any = None


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    prepare: Callable[[], None] | None = None,
    report: Callable[[str], None] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a new group, and return the ranks' results in order.

    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as by torchrun. The ranks' standard output is
    redirected to standard error.

    Args:
        function: importable function.
        world_size: number of processes.
        args: picklable arguments.
        prepare: importable function that each process calls first.
        report: called on a thread with the ranks' lines of progress.

    Raises:
        MegarlError: a rank raised it.
        WorkerError: a rank raised another exception or died; the message has its traceback.
    """
    start_method = _start_method()
    context = mp.get_context(start_method)
    messages = context.SimpleQueue()
    reader = threading.Thread(target=_read, args=(messages, report or (lambda text: None)), daemon=True)
    reader.start()
    store = open_store()
    with tempfile.TemporaryDirectory(prefix="megarl-ranks-") as folder:
        given = (function, prepare, world_size, store.port, folder, messages, args)
        ranks = mp.start_processes(_enter, given, nprocs=world_size, join=False, start_method=start_method)
        failure = None
        try:
            while not ranks.join():
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            failure = error
        except BaseException:  # Ctrl-C. The reader is not joined, since a rank may have died holding the queue's lock.
            for process in ranks.processes:
                process.kill()
            raise
        messages.put(None)
        reader.join()
        if failure is not None:
            raise _failure(Path(folder), failure) from failure
        return [pickle.loads((Path(folder) / f"{rank}.pkl").read_bytes()) for rank in range(world_size)]


def warm_up() -> None:
    """Start the imports for later ranks in the background."""
    forkserver.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


@functools.cache
def _start_method() -> str:
    warm_up()
    forked = not torch.cuda.is_available() or forks_have_gpus(mp.get_context("forkserver"))
    return "forkserver" if forked else "spawn"


def report_progress(text: str) -> None:
    """Send a line of progress to the process that started the ranks; only rank 0 does."""
    if _progress_queue is not None and os.environ["RANK"] == "0":
        _progress_queue.put(text)


def free_memory() -> None:
    """Free the memory of unused models; they refer to themselves, so the garbage collector must run."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _read(messages: Any, report: Callable[[str], None]) -> None:
    while (text := messages.get()) is not None:
        report(text)


def _failure(folder: Path, error: Exception) -> MegarlError:
    """Return the MegarlError that a rank raised, if any; torch may name another rank that failed later."""
    for file in sorted(folder.glob("*.error")):
        raised = pickle.loads(file.read_bytes())
        if isinstance(raised, MegarlError):
            return raised
    return WorkerError(f"a rank failed: {error}")


def _end_with_parent() -> None:
    """End this process when the caller of ``run_ranks`` is gone; ranks would otherwise keep their GPUs."""
    parent = mp.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _enter(
    rank: int,
    function: Callable[..., Any],
    prepare: Callable[[], None] | None,
    world_size: int,
    port: int,
    folder: str,
    messages: Any,
    args: tuple,
) -> None:
    global _progress_queue
    _progress_queue = messages
    _end_with_parent()
    os.dup2(2, 1)  # only the caller writes to standard output: `megarl verify --json` prints nothing else there
    os.environ.update(rank_environment(rank, world_size, "127.0.0.1", port), LOCAL_RANK=str(rank))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // world_size)))
    gc.freeze()  # keeps objects of the imports out of later collections, which would otherwise take half a second each
    try:
        if prepare is not None:
            prepare()
        result = function(*args)
    except MegarlError as error:
        (Path(folder) / f"{rank}.error").write_bytes(pickle.dumps(error))
        raise
    (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps(result))
