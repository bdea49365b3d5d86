# SPDX-License-Identifier: Apache-2.0
"""Find one process among those that a test started."""

import psutil


def describe(process: psutil.Process) -> str:
    """A process's command line and state; a process may end, or turn into a zombie, while it is looked at."""
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())}"
    except (psutil.NoSuchProcess, psutil.ZombieProcess) as error:
        return f"{process.pid} {type(error).__name__}"


def is_engine(line: str) -> bool:
    """Whether a child of a sampler's process is vLLM's engine.

    Its title is not always there: setproctitle looks for argv before the first environment variable, so it sets
    nothing where vLLM has changed that variable, and Ray hands the variables over in no fixed order.
    """
    return "EngineCore" in line or "multiprocessing.spawn" in line


def find_engine(sampler: psutil.Process) -> psutil.Process:
    """The engine process of a sampler's process; raises ValueError where it has none, or several."""
    [engine] = [child for child in sampler.children() if is_engine(describe(child))]
    return engine
