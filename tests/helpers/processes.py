# SPDX-License-Identifier: Apache-2.0
"""Find one process among those that a test started."""

import psutil


def describe(process: psutil.Process) -> str:
    """Return a process's command line and state. The process may end, or become a zombie, during the call."""
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())}"
    except (psutil.NoSuchProcess, psutil.ZombieProcess) as error:
        return f"{process.pid} {type(error).__name__}"


def is_engine(line: str) -> bool:
    """Return True if a child of a sampler's process is vLLM's engine.

    The engine's title is not always set. setproctitle looks for argv before the first environment variable, so it sets
    nothing if vLLM has changed that variable, and Ray passes the variables in no fixed order.
    """
    return "EngineCore" in line or "multiprocessing.spawn" in line


def find_engine(sampler: psutil.Process) -> psutil.Process:
    """Return the engine process of a sampler's process. Raises ValueError if there is not exactly one."""
    [engine] = [child for child in sampler.children() if is_engine(describe(child))]
    return engine
