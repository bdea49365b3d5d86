# SPDX-License-Identifier: Apache-2.0
"""Test which engine gets a request, and that a lost or refusing engine costs no answer. Real engines: tests/e2e."""

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from megarl.controller.actors import dispatch
from megarl.controller.actors.dispatch import Dispatcher, Home
from megarl.controller.actors.engine_handle import EngineHandle
from megarl.controller.actors.sampler_group import SamplerGroup
from megarl.errors import DataError, LostError, StaleVersionError, WeightSyncError, WorkerError


class Reference:
    """An answer that the test gives."""

    def __init__(self, question):
        self.question, self.answer = question, Future()

    def future(self):
        return self.answer


class Actor:
    """An engine that keeps what it is asked."""

    def __init__(self):
        self.asked = []
        self.sample = SimpleNamespace(remote=self._ask)

    def _ask(self, question):
        self.asked.append(Reference(question))
        return self.asked[-1]

    @property
    def questions(self):
        return [reference.question for reference in self.asked]


class Rig:
    """A dispatcher of some engines."""

    def __init__(self, count=2, room=100, seconds=60.0):
        self.silent, self.lost = set(), []
        watch = SimpleNamespace(check_head=lambda: None, check=self._check, log_note=lambda name: "")
        self.actors = [Actor() for _ in range(count)]
        self.engines = [EngineHandle(actor, index, 1, watch) for index, actor in enumerate(self.actors)]
        self.dispatcher = Dispatcher(self.engines, watch, seconds, room)
        self.dispatcher.on_lost = lambda engine, error: self.lost.append((engine.name, str(error)))

    def _check(self, names):
        if hit := [name for name in names if name in self.silent]:
            raise LostError.of(hit, f"{hit[0]} is silent")

    def ask(self, *questions, **options):
        return [self.dispatcher.submit("sample", question, **options) for question in questions]


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def make():
    made = []

    def begin(*arguments, **options):
        made.append(Rig(*arguments, **options))
        return made[-1]

    yield begin
    for rig in made:
        rig.dispatcher.close()


def test_requests_go_to_the_engine_with_the_least_to_do_and_a_slow_one_holds_no_others(make):
    rig = make(room=4)
    futures = rig.ask(*range(8), weight=2)
    fast, slow = rig.actors
    assert [fast.questions, slow.questions] == [[0, 2], [1, 3]]  # the rest waits here
    done = 0
    while done < len(fast.asked):
        reference = fast.asked[done]
        reference.answer.set_result(reference.question * 10)
        done += 1
        until(lambda done=done: len(fast.asked) > done or done >= 6)
    assert fast.questions == [0, 2, 4, 5, 6, 7] and slow.questions == [1, 3]
    until(lambda: sum(future.done() for future in futures) == 6)
    for reference in slow.asked:
        reference.answer.set_result(reference.question * 10)
    assert [future.result(5) for future in futures] == [10 * i for i in range(8)]
    assert rig.dispatcher.sent_again() == 0


def test_requests_of_a_dead_engine_go_to_the_others_in_order_and_late_answers_are_ignored(make):
    rig = make(room=4)
    futures = rig.ask(*range(6), weight=2)
    dead, other = rig.actors
    late = dead.asked[1]
    dead.asked[0].answer.set_exception(WorkerError("its process died"))
    until(lambda: rig.lost)
    assert rig.lost == [("sampler 0", "its process died")] and rig.engines[0].lost == "its process died"
    late.answer.set_result("too late")
    for number in range(6):
        until(lambda number=number: len(other.asked) > number)
        other.asked[number].answer.set_result(other.asked[number].question)
    assert other.questions == [1, 3, 0, 2, 4, 5]
    assert [future.result(5) for future in futures] == list(range(6))
    assert rig.dispatcher.sent_again() == 2 and rig.dispatcher.sent_again() == 0


def test_requests_wait_for_the_successor_of_the_only_engine(make):
    rig = make(count=1)
    [future] = rig.ask("a")
    rig.actors[0].asked[0].answer.set_exception(WorkerError("dead"))
    until(lambda: rig.lost)
    [later] = rig.ask("b")
    assert len(rig.actors[0].asked) == 1
    rig.engines[0].actor = successor = Actor()
    rig.dispatcher.open(rig.engines[0])
    assert successor.questions == ["a", "b"] and not later.done()
    for reference in successor.asked:
        reference.answer.set_result("answer")
    assert future.result(5) == later.result(5) == "answer"


@pytest.mark.parametrize("error", [WeightSyncError("an earlier sync failed"), StaleVersionError("holds none yet")])
def test_an_engine_that_refuses_after_a_failed_sync_gets_nothing_until_it_is_readmitted(make, error):
    rig = make(count=1)
    [future] = rig.ask("a")
    rig.engines[0].closed = True
    rig.actors[0].asked[0].answer.set_exception(error)
    until(lambda: rig.dispatcher.sent_again())
    assert not future.done() and rig.lost == [] and len(rig.actors[0].asked) == 1
    rig.dispatcher.open(rig.engines[0])
    rig.actors[0].asked[1].answer.set_result("answer")
    assert future.result(5) == "answer"


@pytest.mark.parametrize("error", [DataError("the prompt is too long"), StaleVersionError("holds version 3")])
def test_an_error_of_the_request_itself_is_raised(make, error):
    rig = make()
    [future] = rig.ask("a")
    rig.actors[0].asked[0].answer.set_exception(error)
    with pytest.raises(type(error), match=str(error)):
        future.result(5)
    assert rig.lost == []


def test_an_engine_that_is_silent_or_too_slow_is_lost(make, monkeypatch):
    monkeypatch.setattr(dispatch, "LOOK_SECONDS", 0.02)
    rig = make(seconds=0.2)
    [future] = rig.ask("a")
    rig.silent.add("sampler 1")
    until(lambda: len(rig.lost) == 2)
    assert rig.lost[0] == ("sampler 1", "sampler 1 is silent")
    assert rig.lost[1][1].startswith("sampler 0 did not answer within sampler.generate_seconds (0.2 s)")
    assert not future.done()


def test_turns_of_a_prompt_stay_on_its_engine_while_that_lives(make):
    rig = make()
    homes = [Home(), Home(), Home()]
    for turn in range(3):
        for number, home in enumerate(homes):
            rig.ask((number, turn), home=home)
    for actor in rig.actors:
        assert len({number for number, _ in actor.questions}) in (1, 2)
    assert sorted(rig.actors[0].questions + rig.actors[1].questions) == [(n, t) for n in range(3) for t in range(3)]
    rig.dispatcher.lose(rig.engines[0], WorkerError("dead"))
    until(lambda: len(rig.actors[1].asked) == 9)
    assert all(home.engine is rig.engines[1] for home in homes)


def test_what_is_cancelled_is_neither_sent_nor_answered(make, monkeypatch):
    cancelled = []
    monkeypatch.setattr(dispatch.ray, "cancel", cancelled.append)
    rig = make(room=1)
    futures = rig.ask("a", "b", "c")
    rig.dispatcher.cancel(futures[1:])
    assert [one.question for one in cancelled] == ["b"] and rig.actors[1].questions == ["b"]
    rig.actors[0].asked[0].answer.set_result("answer")
    assert futures[0].result(5) == "answer" and futures[2].cancelled()
    assert rig.actors[0].questions == ["a"]


def test_when_nothing_is_started_again_every_request_fails_those_of_the_future_too(make):
    rig = make(room=1)
    rig.dispatcher.on_lost = lambda engine, error: rig.dispatcher.fail(error)
    futures = rig.ask("a", "b", "c")
    threading.Thread(target=lambda: rig.actors[0].asked[0].answer.set_exception(WorkerError("dead"))).start()
    for future in [*futures, *rig.ask("d")]:
        with pytest.raises(WorkerError, match="dead"):
            future.result(5)
    with pytest.raises(WorkerError, match="dead"):
        rig.dispatcher.check()


def test_an_engine_that_started_again_is_not_lost_by_the_answer_that_the_dead_one_owes(make, monkeypatch):
    rig = make()
    for actor in rig.actors:
        actor.score = SimpleNamespace(remote=lambda tokens, version: "a call")
    monkeypatch.setattr(SamplerGroup, "__init__", lambda self, engines: setattr(self, "engines", engines))
    monkeypatch.setattr(SamplerGroup, "_each", lambda self, calls: [engine.name for engine in calls])
    wait = SamplerGroup(rig.engines).start_score([1, 2], 3)
    assert wait() == ["sampler 0", "sampler 1"]
    rig.engines[0].actor = Actor()
    assert wait() == ["sampler 1"]
