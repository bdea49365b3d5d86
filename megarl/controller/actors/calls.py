# SPDX-License-Identifier: Apache-2.0
"""Wait for the results of actors, and report which one failed and why."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from megarl.controller.actors.logs import root_of
from megarl.controller.actors.pulse import Watch
from megarl.errors import LostError, MegarlError, WorkerError
from megarl.futures import in_thread

# Seconds between two checks that all participants are alive.
LOOK_SECONDS = 0.5


class Limit(NamedTuple):
    """A time limit on calls, and the setting that gives it.

    Attributes:
        setting: the setting's name, for messages (``"train.update_seconds"``).
        seconds: the limit, in seconds.
    """

    setting: str
    seconds: float


def wait_all(
    calls: dict[str, Any],
    watch: Watch | None = None,
    limit: Limit | None = None,
    *,
    watched: Sequence[str] | None = None,
    look: Callable[[], None] = lambda: None,
    moving: bool = False,
) -> list[Any]:
    """Return the results of remote calls, in order. Raises as soon as one call fails, without waiting for the others.

    Args:
        calls: participant's name -> object reference of its result.
        watch: tells which participants are alive and where their logs are.
        limit: limit on all calls together, or None.
        watched: participants that must give signs of life meanwhile; default: those that are waited for.
        look: called now and then; what it raises ends the wait.
        moving: True if those that are watched must also get on with their work; see ``Watch.check_progress``.

    Raises:
        MegarlError: the error that the participant raised, with the path of its log.
        LostError: a dead process, a participant without signs of life, or an exceeded limit.
        WorkerError: any other exception. The message names the participant and its log.
    """
    names = {reference: name for name, reference in calls.items()}
    pending, results = list(names), dict[Any, Any]()
    began = time.monotonic()
    deadline = began + limit.seconds if limit else float("inf")
    while pending:
        ready, pending = ray.wait(pending, timeout=max(0.0, min(LOOK_SECONDS, deadline - time.monotonic())))
        for reference in ready:
            results[reference] = result_of(reference, names[reference], watch)
        if pending and watch:
            chosen = [names[reference] for reference in pending] if watched is None else watched
            watch.check(chosen)
            if moving:
                # One that has ended its call got on too.
                watch.check_progress(list(calls) if watched is None else watched, began)
        if pending:
            look()
        if pending and limit and time.monotonic() >= deadline:
            late = [names[reference] for reference in pending]
            log_note = watch.log_note(late[0]) if watch else ""
            raise LostError.of(
                late, f"{', '.join(late)} did not answer within {limit.setting} ({limit.seconds:g} s){log_note}"
            )
    return [results[reference] for reference in names]


def result_of(reference: Any, name: str, watch: Watch | None = None) -> Any:
    """Return the result of one remote call. Raises what ``wait_all`` raises."""
    try:
        return ray.get(reference)
    except RayError as error:
        raise named_error(error, name, watch) from None


def named_error(error: RayError, name: str, watch: Watch | None = None) -> MegarlError:
    """Return the error of a remote call as ``wait_all`` raises it."""
    log_note = watch.log_note(name) if watch else ""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, MegarlError):
            return with_note(cause, log_note)
        root = root_of(str(error)) or f"{type(cause).__name__}: {cause}"
        return WorkerError(f"{name} failed:\n{_traceback_of(error)}\n{root}{log_note}")
    if isinstance(error, RayActorError):
        reason = str(error).strip().splitlines()
        return LostError.of([name], f"{name} died: {' '.join(reason[:6])}{log_note}")
    return WorkerError(f"{name} failed: {error}{log_note}")


def with_note(error: MegarlError, note: str) -> MegarlError:
    """Return an error with a note at the end of its message, once."""
    if note not in str(error):
        error.args = (f"{error}{note}",)
    return error


def _traceback_of(error: RayTaskError) -> str:
    """Return the last lines of the remote traceback, enough to find the place of the error."""
    return "\n".join(str(error).strip().splitlines()[-12:])


def as_future(calls: dict[str, Any], watch: Watch) -> Future:
    """Return the first participant's result once all have one, as a future; it raises what ``wait_all`` raises."""
    return in_thread(lambda: wait_all(calls, watch)[0])


def dead(actors: Mapping[str, Any], seconds: float, watch: Watch) -> dict[str, WorkerError]:
    """Return why each actor that is dead is so.

    Args:
        actors: participant's name -> actor, whose method ``ping`` raises if it cannot work any more.
        seconds: how long to wait for answers. An actor that is busy gives none; Ray answers for a dead one.
        watch: knows where their logs are.
    """
    pings = {actor.ping.remote(): name for name, actor in actors.items()}
    ready, _ = ray.wait(list(pings), num_returns=len(pings), timeout=seconds)
    found = {}
    for reference in ready:
        try:
            result_of(reference, pings[reference], watch)
        except WorkerError as error:
            found[pings[reference]] = error
    return found
