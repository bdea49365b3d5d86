# SPDX-License-Identifier: Apache-2.0
"""Find one process among those that a test started."""

import contextlib

import psutil


def describe(process: psutil.Process) -> str:
    """Return a process's command line and state. The process may end, or become a zombie, during the call."""
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())}"
    except (psutil.NoSuchProcess, psutil.ZombieProcess) as error:
        return f"{process.pid} {type(error).__name__}"


def is_engine(process: psutil.Process) -> bool:
    """Return True if a child of a sampler's process, or of its fork server, is vLLM's engine.

    The engine's title is not always set. setproctitle looks for argv before the first environment variable, so it sets
    nothing if vLLM has changed that variable, and Ray passes the variables in no fixed order.
    """
    line = describe(process)
    if "EngineCore" in line or "multiprocessing.spawn" in line:
        return True
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return _is_fork_server(process) and parent is not None and _is_fork_server(parent)
    return False


def find_engine(sampler: psutil.Process) -> psutil.Process:
    """Return the engine process of a sampler's process. Raises ValueError if there is not exactly one."""
    children = sampler.children()
    forked = [child for server in children if _is_fork_server(server) for child in server.children()]
    [engine] = [child for child in (*children, *forked) if is_engine(child)]
    return engine


def _is_fork_server(process: psutil.Process) -> bool:
    """Return True for a fork server, and for what is forked from it and has no title of its own."""
    return "multiprocessing.forkserver" in describe(process)


def is_alive(process: psutil.Process) -> bool:
    """Return True if a process has not ended, which it may do at any time."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
