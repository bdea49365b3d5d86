# SPDX-License-Identifier: Apache-2.0
"""Check that the head's launcher has patience with its Ray. Real Ray is in tests/unit/scripts/test_launch.py."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.errors import WorkerError
from megarl.launch.nodes import node as nodes
from megarl.launch.nodes.cluster import HeadUnreachableError
from megarl.launch.nodes.settings import NodeSettings

NAMES = ["10.0.0.1", "10.0.0.2"]


class Cluster:
    """Gives these answers to its first questions, then the last one for ever; None is no answer."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.answers, self.status = list(answers), None

    def alive_nodes(self) -> list[str]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise HeadUnreachableError("no Ray head answers at 10.0.0.1:6379: deadline exceeded")
        return answer

    def announce(self, status: int) -> None:
        self.alive_nodes()
        self.status = status


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> nodes.Node:
    monkeypatch.setattr(nodes, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(nodes, "LEAVE_SECONDS", 0.3)
    head = nodes.Node(NodeSettings(0, 2, "node0", "10.0.0.1", 6379, 0.3, 1.0, None, None, ("true",)))
    head.ray = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
    return head


def test_a_head_that_answers_late_does_not_end_the_launch(head: nodes.Node, capsys: pytest.CaptureFixture) -> None:
    head._wait_for_nodes(Cluster([None, NAMES[:1], None, None, NAMES]))  # type: ignore[arg-type]
    assert "2 of 2 nodes have joined" in capsys.readouterr().err


def test_a_head_that_never_answers_is_named_when_the_time_is_over(head: nodes.Node) -> None:
    with pytest.raises(WorkerError, match=r"only 1 of 2 nodes joined .*: 10.0.0.1.*no Ray head answers at 10.0.0.1"):
        head._wait_for_nodes(Cluster([NAMES[:1], None]))  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="only 1 of 2 nodes joined") as raised:
        head._wait_for_nodes(Cluster([None, NAMES[:1]]))  # type: ignore[arg-type]
    assert "no Ray head answers" not in str(raised.value)


@pytest.mark.parametrize("answers", [[None, None, NAMES, None, NAMES, NAMES[:1]], [NAMES, NAMES[:1]]])
def test_the_job_s_end_is_told_though_the_head_answers_late(
    head: nodes.Node, capsys: pytest.CaptureFixture, answers: list
) -> None:
    cluster = Cluster(answers)
    head._dismiss(cluster, 3)  # type: ignore[arg-type]
    assert cluster.status == 3 and cluster.answers == [NAMES[:1]]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("ended", [None, 1])
def test_workers_that_cannot_be_told_are_named(
    head: nodes.Node, capsys: pytest.CaptureFixture, ended: int | None
) -> None:
    head.ray = SimpleNamespace(poll=lambda: ended)  # type: ignore[assignment]
    cluster = Cluster([None])
    head._dismiss(cluster, 0)  # type: ignore[arg-type]
    assert cluster.status is None and "the workers could not be told" in capsys.readouterr().err
