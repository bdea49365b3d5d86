# SPDX-License-Identifier: Apache-2.0
"""Threads that run work, and waiting for what they return."""

import contextlib
import os
import threading
import time
from concurrent.futures import Future

import pytest

from megarl import futures
from megarl.errors import LostError
from megarl.futures import Joined, KeptThread, ReadByWaiter, done, finished, results, wait_or_read


def test_work_runs_in_one_thread_unless_that_is_busy():
    kept, end = KeptThread(), threading.Event()
    first, second = (kept.start(threading.get_ident).result(5) for _ in range(2))
    assert first == second != threading.get_ident()
    stuck = kept.start(end.wait)
    assert kept.start(threading.get_ident).result(5) != first
    end.set()
    assert stuck.result(5) is True
    assert kept.start(threading.get_ident).result(5) == first


def test_an_exception_is_the_works_result_and_the_thread_goes_on():
    kept = KeptThread()
    with pytest.raises(ZeroDivisionError):
        kept.start(lambda: 1 // 0).result(5)
    assert kept.start(lambda: 2).result(5) == 2


def test_work_done_at_once_has_an_error_as_its_result_but_ctrl_c_is_raised():
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert done(lambda: 1).result(0) == 1
    with pytest.raises(ZeroDivisionError):
        done(lambda: 1 // 0).result(0)
    with pytest.raises(KeyboardInterrupt):
        done(interrupt)


def test_results_raise_the_first_failure_without_waiting_for_the_others():
    done, failed, never = Future[int](), Future[int](), Future[int]()
    done.set_result(1)
    failed.set_exception(KeyError("x"))
    with pytest.raises(KeyError):
        results([done, never, failed], 5.0, lambda: None)
    assert finished([never, done], 5.0) == [(done, 1)] and finished([], 5.0) == []


def test_a_look_can_end_the_wait():
    def look() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        results([Future[int]()], 0.01, look)


class Piped(ReadByWaiter):
    """A future whose result is the byte that comes through a pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.end, self.other_end = os.pipe()
        os.set_blocking(self.end, False)

    def filenos(self) -> list[int]:
        return [self.end]

    def look(self) -> None:
        with contextlib.suppress(BlockingIOError):  # nothing has come
            self.set_result(os.read(self.end, 1))


def test_a_wait_reads_what_nobody_else_reads():
    first, second, ordinary = Piped(), Piped(), Future[int]()
    os.write(first.other_end, b"1")
    assert wait_or_read([first], 5.0) == ({first}, set())
    assert first.result(0) == b"1"

    def settle() -> None:
        time.sleep(0.05)
        ordinary.set_result(3)
        time.sleep(0.05)
        os.write(second.other_end, b"2")

    threading.Thread(target=settle).start()
    assert wait_or_read([ordinary, second], None) == ({ordinary, second}, set())
    assert (ordinary.result(0), second.result(0)) == (3, b"2")


def test_a_wait_that_reads_ends_with_the_first_failure_and_with_its_time():
    unread, failed, never = Piped(), Future[int](), Future[int]()
    assert wait_or_read([unread, never], 0.01) == (set(), {unread, never})
    threading.Timer(0.05, failed.set_exception, [KeyError("x")]).start()
    began = time.monotonic()
    assert wait_or_read([unread, failed], 60.0) == ({failed}, {unread})
    assert time.monotonic() - began < 50.0
    # A future that ends after the wait finds nobody to wake.
    never.set_result(1)
    assert wait_or_read([failed], 5.0) == ({failed}, set())


@pytest.mark.parametrize("other", [Piped, Future])
def test_a_wait_ends_when_there_is_enough(other):
    never, first = other(), Future[int]()
    assert wait_or_read([first, never], 60.0, lambda: True) == (set(), {first, never})
    threading.Timer(0.05, first.set_result, [1]).start()
    began = time.monotonic()
    assert wait_or_read([first, never], 60.0, first.done) == ({first}, {never})
    assert time.monotonic() - began < 50.0


def test_joined_futures_give_one_result_in_their_order_or_the_first_error():
    first, second, ordinary = Piped(), Piped(), Future[int]()
    joined = Joined([first, second], list)
    assert wait_or_read([joined, ordinary], 0.01) == (set(), {joined, ordinary})
    os.write(second.other_end, b"2")
    threading.Timer(0.05, os.write, [first.other_end, b"1"]).start()
    assert joined.result(60.0) == [b"1", b"2"]

    unread, lost, failed = Piped(), Piped(), Piped()
    failed.set_exception(KeyError("peer"))
    assert isinstance(Joined([unread, failed], list).exception(60.0), KeyError)
    lost.set_exception(LostError.of(["rank 0"], "rank 0 died"))
    assert isinstance(Joined([unread, lost, failed], list).exception(60.0), LostError)
    with pytest.raises(ZeroDivisionError):
        Joined([first], lambda results: 1 // 0).result(60.0)

    def interrupt(results: list) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Joined([first], interrupt).look()


def test_a_wait_also_looks_when_nothing_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(futures, "LOOK_SECONDS", 0.01)
    silent = Piped()
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            silent.set_exception(OSError("no sign of life"))

    monkeypatch.setattr(silent, "look", look)
    with pytest.raises(OSError, match="no sign of life"):
        silent.result(60.0)
