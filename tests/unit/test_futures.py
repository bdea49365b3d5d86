# SPDX-License-Identifier: Apache-2.0
"""Threads that run work, and waiting for what they return."""

import threading
from concurrent.futures import Future

import pytest

from megarl.futures import KeptThread, done, finished, results


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
