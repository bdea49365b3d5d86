# SPDX-License-Identifier: Apache-2.0
"""Let a signal end the run between two steps, not in one: what the trainers have begun is done, and then saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from megarl.errors import MegarlError

if TYPE_CHECKING:
    from megarl.controller.state import RunState


class StepEnds(KeyboardInterrupt):
    """A signal ends the run now, between two steps; a second Ctrl-C is a plain ``KeyboardInterrupt``."""


@contextmanager
def until_the_step_ends(state: "RunState") -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP wait until the block ends. ``state.ending`` then names the signal.

    A second Ctrl-C ends the run at once. A second SIGTERM does not: Slurm and the launcher may both send it. Does
    nothing outside of the main thread.

    Raises:
        StepEnds: the step failed after a signal. Nothing is started again then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]

    def handle(number: int, frame: Any) -> None:
        if state.ending and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not state.ending:
            state.ending = f"signal {signal.Signals(number).name}"
            with suppress(RuntimeError):  # the signal came while something was printed
                text = f"{state.ending}: the run ends after this step, which is saved first (Ctrl-C: now)"
                state.recorder.screen.say(text, style="bold yellow")

    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    except MegarlError as error:
        end_if_asked(state, error)
        raise
    finally:
        for number, handler in previous.items():
            ignored = state.ending and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if ignored else handler)


def end_if_asked(state: "RunState", cause: BaseException | None = None) -> None:
    """Raise ``StepEnds`` if a signal came during a step."""
    if state.ending:
        raise StepEnds(state.ending) from cause
