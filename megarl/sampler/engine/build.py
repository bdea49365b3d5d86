# SPDX-License-Identifier: Apache-2.0
"""Build vLLM's engine from an EngineConfig."""

import dataclasses
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from megarl.config import EngineConfig
from megarl.errors import ConfigError, LostError, WorkerError, nearest
from megarl.sampler.engine import fork_server
from megarl.sampler.engine.settings import engine_arguments
from megarl.sampler.environment import prepare_numerics

# vLLM says the exit statuses of its processes; a negative one is a signal's number (0.26, 0.32). It says none if it
# looks too early; a process that raised has printed its exception by then.
KILLED = re.compile(r"Failed core proc\(s\): .*: -\d")
GONE = re.compile(r"Failed core proc\(s\): \{\}")


def import_vllm(numerics: str, device: str) -> None:
    """Import what ``build_engine`` needs, which takes seconds; beside it, what the engine's own process needs.

    Args:
        numerics: as for ``fork_server.begin``.
        device: as for ``build_engine``.
    """
    fork_server.begin(numerics, device)
    import_module("vllm.v1.engine.async_llm")


def build_engine(config: EngineConfig, engine_index: int, device: str, loan: bytes = b"") -> Any:
    """Return a running ``AsyncLLM``.

    Args:
        config: the engine's config.
        engine_index: index of the engine, 0 .. sampler.engines - 1.
        device: ``"cpu"`` or ``"cuda"``.
        loan: ``lend_base`` of the trainer rank on the GPU, whose base is then read; for several GPUs ``joined``.

    Raises:
        ConfigError: ``sampler.engine_args`` names an argument that vLLM does not have.
        Exception: whatever vLLM raises.
    """
    prepare_numerics(config.model.numerics)
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with _file_of(loan) as file:
        given = engine_arguments(config, engine_index, device, file)
        known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
        for name in given.keys() - known:
            raise ConfigError(f"sampler.engine_args.{name}: vLLM has no such argument{nearest(name, known)}")
        with fork_server.forked():
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**given))


@contextmanager
def _file_of(loan: bytes) -> Iterator[str]:
    """Keep a loan in a file, which vLLM's processes read while they start; yield its path, empty for no loan."""
    if not loan:
        yield ""
        return
    with tempfile.NamedTemporaryFile(prefix="megarl-loan-") as file:
        file.write(loan)
        file.flush()
        yield file.name


def start_error(engine_index: int, error: Exception) -> WorkerError:
    """Return the error of an engine that did not start: a ``LostError`` if a signal killed its process."""
    name = f"sampler {engine_index}"
    if KILLED.search(str(error)):
        return LostError.of([name], f"{name} was killed while it started: {error}")
    return WorkerError(f"{name} did not start: {error}")
