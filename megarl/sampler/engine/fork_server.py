# SPDX-License-Identifier: Apache-2.0
"""Import vLLM for the engine's own process while this process imports it too.

vLLM starts that process once the front end has imported vLLM and read the config, and it imports everything again. A
fork server does those imports beside the front end's, and the process is forked from it. Other processes may not be
forked from: a Ray actor has threads that a fork would leave behind. Only for CPUs: on CUDA it has not been tried, and
an import that initialises CUDA in the server would leave forked processes without GPUs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, forkserver
from typing import Any

from megarl.sampler.environment import prepare_numerics

# What the engine's process imports before it loads a model.
PRELOAD = ["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "megarl.sampler.worker.extension"]


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


_begun = False


def begin(numerics: str) -> None:
    """Start the imports, in the background, with this process's present environment.

    Args:
        numerics: ``model.numerics``; vLLM's operations are replaced while they are imported.
    """
    global _begun
    _begun = True
    prepare_numerics(numerics)
    forkserver.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


@contextmanager
def forked() -> Iterator[None]:
    """Let vLLM fork its engine's process from the fork server, if it starts one in the block and ``begin`` was called.

    vLLM asks ``get_mp_context`` how to start it (0.26, 0.32), which knows ``fork`` and ``spawn`` only. The function is
    called nevertheless: it sets variables for the process.
    """
    if not _begun:
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
