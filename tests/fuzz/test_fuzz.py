# SPDX-License-Identifier: Apache-2.0
"""Run a few hundred seeded cases of every target; ``python -m tests.fuzz`` runs thousands."""

import random
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from tests.fuzz.harness import Mutation, WrongResult, judge, run_cases, summary
from tests.fuzz.mutate import bytes_of, tree_of
from tests.fuzz.targets import IN_SUITE
from tests.helpers.ranks import run_ranks

SEED = 11


@pytest.mark.parametrize("name", IN_SUITE)
def test_a_changed_subject_is_refused_by_name_or_read_right(tmp_path, name):
    [outcomes] = run_ranks(run_cases, 1, name, SEED, range(IN_SUITE[name]), str(tmp_path / name))
    print(f"\n{summary(outcomes)}")
    assert len(outcomes) == IN_SUITE[name]
    failed = [str(outcome) for outcome in outcomes if outcome.failed]
    assert not failed, f"{len(failed)} of {len(outcomes)}:\n" + "\n".join(failed[:5])
    # Otherwise the changes miss what is read, or spoil everything.
    kinds = {outcome.kind for outcome in outcomes}
    assert kinds == {"right", "refused"}


class Planted:
    """A target whose reader fails in a given way."""

    def __init__(self, error):
        self.error = error

    def check(self, folder):
        if self.error:
            raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (None, "right"),
        (ConfigError("train.steps is 'x'; it must be an integer"), "refused"),
        (ConfigError("no"), "unnamed"),
        (ConfigError("something in some file is wrong somehow"), "unnamed"),
        (KeyError("steps"), "crashed"),
        (RecursionError(), "crashed"),
        (WrongResult("train.steps is 3, but 4 is written"), "wrong"),
    ],
    ids=str,
)
def test_the_fuzzer_tells_right_from_wrong(error, kind):
    assert judge(Planted(error), Path(), Mutation("train.steps = 'x'", ("train.steps",)))[0] == kind


def test_a_case_that_does_not_end_is_found(monkeypatch):
    class Endless:
        def check(self, folder):
            while True:
                pass

    monkeypatch.setattr("tests.fuzz.harness.CASE_SECONDS", 0.2)
    assert judge(Endless(), Path(), Mutation("x"))[0] == "hung"


def test_cases_repeat(tmp_path):
    """Check that the same seed makes the same changes, and other numbers others."""
    results = set()
    for number in (1, 1, 2):
        file = tmp_path / "file"
        file.write_bytes(bytes(range(256)))
        tree = {"a": {"b": [1, 2.5, "x"]}, "c": None}
        draw = random.Random(f"x-{number}")
        said = [tree_of(tree, draw), bytes_of(file, draw).what]
        results.add((str(said), str(tree)))
        if file.is_dir():
            file.rmdir()
        else:
            file.unlink(missing_ok=True)
    assert len(results) == 2
