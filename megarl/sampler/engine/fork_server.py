# SPDX-License-Identifier: Apache-2.0
"""Import vLLM for the engine's own process while this process imports it too.

vLLM starts that process once the front end has imported vLLM and read the config, and it imports everything again. A
fork server does those imports beside the front end's, and the process is forked from it. Other processes may not be
forked from: a Ray actor has threads that a fork would leave behind. An import that initialises CUDA in the server would
leave forked processes without GPUs. So with CUDA a first process looks for that, and if it could not use a GPU, vLLM
starts its own way (``forks``).
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import context, forkserver
from typing import Any

from megarl.forks import forks_have_gpus
from megarl.sampler.environment import prepare_numerics

# What the engine's process imports before it loads a model.
PRELOAD = ["vllm.v1.engine.core", "megarl.sampler.worker.extension"]
# And by device. Other devices (Ascend) have not been tried: there the server is not begun.
WORKERS = {"cpu": "vllm.v1.worker.cpu_worker", "cuda": "vllm.v1.worker.gpu_worker"}


class _Process(context.ForkServerProcess):
    """A process that begins with the environment of the one that starts it, not with the fork server's."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process


# Whether forked processes have what the engine needs; None: the server was not begun.
_usable: Future[bool] | None = None


def begin(numerics: str, device: str) -> None:
    """Start the imports, in the background, with this process's present environment, unless they were started before.

    Args:
        numerics: ``model.numerics``; vLLM's operations are replaced while they are imported.
        device: a key of ``WORKERS``; for any other nothing is started.
    """
    global _usable
    if device not in WORKERS or _usable is not None:
        return
    prepare_numerics(numerics)
    forkserver.set_forkserver_preload([*PRELOAD, WORKERS[device]])
    forkserver.ensure_running()
    if device == "cuda":
        _usable = ThreadPoolExecutor(1, thread_name_prefix="megarl-forks").submit(forks_have_gpus, _Context())
    else:
        _usable = Future()
        _usable.set_result(True)


@contextmanager
def forked() -> Iterator[None]:
    """Let vLLM fork its engine's process from the fork server, if it starts one in the block and can use the server.

    vLLM asks ``get_mp_context`` how to start it (0.26, 0.32), which knows ``fork`` and ``spawn`` only. The function is
    called nevertheless: it sets variables for the process.
    """
    if _usable is None or not _usable.result():
        yield
        return
    from vllm.v1.engine import utils

    chosen = utils.get_mp_context

    def preloaded() -> Any:
        chosen()
        return _Context()

    utils.get_mp_context = preloaded
    try:
        yield
    finally:
        utils.get_mp_context = chosen
