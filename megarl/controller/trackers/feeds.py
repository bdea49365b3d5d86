# SPDX-License-Identifier: Apache-2.0
"""Feed the run's trackers in threads: a slow one does not hold the run, and one that fails does not end it."""

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from megarl.controller.trackers import load_tracker
from megarl.controller.trackers.base import TrackedRun, Tracker
from megarl.errors import ConfigError
from megarl.files import write_text, writing
from megarl.run_folder import TRACKER_IDS

# Seconds that all trackers together may take to send what is left, when the run is complete or ended early.
FINISH_SECONDS, EARLY_SECONDS = 60.0, 5.0


class Feed:
    """Opens one tracker in a thread, and calls it there, in order. After its first error it gets nothing more."""

    def __init__(self, name: str, make: Callable[[], Tracker], say: Callable[[str], None]) -> None:
        """
        Args:
            name: the tracker's, for messages.
            make: opens the tracker. It runs in the thread, since a library may want to be used where it was opened;
                and only the main thread could have its handlers of signals replaced (by SwanLab).
            say: shows a message.
        """
        self.name, self._say = name, say
        self._opened: Future[Tracker] = Future()
        self._calls: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def tracker(self) -> Tracker:
        """Return the tracker when it is open; raise what opening it raised."""
        return self._opened.result()

    def put(self, method: str, argument: Any) -> None:
        """Call a method of the tracker, later."""
        self._calls.put((method, argument))

    def end(self) -> None:
        """Let the thread end after the calls that were put."""
        self._calls.put(None)

    def join(self, seconds: float) -> bool:
        """Wait until the thread has ended; return False if it has not."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
        except BaseException as error:  # raised where it is waited for
            self._opened.set_exception(error)
            return
        self._opened.set_result(tracker)
        while (call := self._calls.get()) is not None:
            method, argument = call
            try:
                getattr(tracker, method)(argument)
            except (Exception, SystemExit) as error:  # of a library, or of the user's code
                self._say(
                    f"tracker '{self.name}' failed and gets nothing more of this run, which goes on: "
                    f"{type(error).__name__}: {error}"
                )
                return


class Feeds:
    """The feeds of a run's trackers."""

    def __init__(self, names: Sequence[str], say: Callable[[str], None]) -> None:
        """
        Args:
            names: ``train.trackers``.
            say: shows a message; called from any thread.
        """
        self._names, self._say = names, say
        self._feeds: list[Feed] = []

    def open(self, run: TrackedRun) -> None:
        """Open the trackers, and keep their ids in the run folder for a resume.

        Args:
            run: the run; ``id`` is read from its folder.

        Raises:
            ConfigError: a tracker of a new run cannot be opened. That of a resumed run is left out with a message.
        """
        file = run.folder / TRACKER_IDS
        ids = self._read_ids(run)
        for name in self._names:
            try:
                factory = load_tracker(name)
                feed = Feed(name, partial(factory, replace(run, id=ids.get(name))), self._say)
                tracker = feed.tracker()
            except (Exception, SystemExit) as error:
                problem = f"train.trackers: '{name}' cannot be opened: {type(error).__name__}: {error}"
                if not run.resumed:
                    raise ConfigError(f"{problem}; use its offline mode, or leave it out") from error
                self._say(f"{problem}; the run goes on without it")
                continue
            self._feeds.append(feed)
            if identity := getattr(tracker, "id", None):
                ids[name] = str(identity)
        if ids:
            with writing(file):
                write_text(file, json.dumps(ids, indent=1) + "\n")

    def log(self, row: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        for feed in self._feeds:
            feed.put("log", dict(row))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Send the summary and close the trackers. Safe to call twice; the second call does nothing.

        Args:
            summary: the run's summary; None if the run ended early.
        """
        feeds, self._feeds = self._feeds, []
        for feed in feeds:
            feed.put("finish", summary)
            feed.end()
        deadline = time.monotonic() + (EARLY_SECONDS if summary is None else FINISH_SECONDS)
        for feed in feeds:
            if not feed.join(max(0.0, deadline - time.monotonic())):
                self._say(f"tracker '{feed.name}' is still sending; the run does not wait for it any longer")

    def _read_ids(self, run: TrackedRun) -> dict[str, str]:
        file = run.folder / TRACKER_IDS
        if not run.resumed or not file.is_file():
            return {}
        try:
            ids = json.loads(file.read_text())
            return {str(name): str(identity) for name, identity in ids.items()}
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            self._say(f"'{file}' cannot be read, so trackers begin a new run: {error}")
            return {}
