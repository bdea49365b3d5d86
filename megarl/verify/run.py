# SPDX-License-Identifier: Apache-2.0
"""Verify models at layouts: start the processes, judge the findings, explain what differs first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from megarl.config.back_ends import TRANSFORMERS
from megarl.errors import ConfigError
from megarl.verify.bounds import BOUNDS, EACH_GRADIENT, EXPORTED_WEIGHTS, MERGED_WEIGHTS
from megarl.verify.cases import Case, Place
from megarl.verify.compare import Finding, Row, worst_of
from megarl.verify.explain.difference import explain
from megarl.verify.inputs.layouts import other_layout, place_name
from megarl.verify.launch import run_ranks
from megarl.verify.ranks import Stage, run_stages
from megarl.verify.reference.reference_runs import make_truth, make_yardstick, read_back, run_shared

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """The result for one model at one layout.

    Attributes:
        place: the case and the layout.
        rows: judged rows in the report's order.
        truth: dtype of the truth.
        differences: lines about the first difference, if a row failed.
    """

    place: Place
    rows: list[Row]
    truth: str
    differences: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if every row passed."""
        return all(row.passed for row in self.rows)

    @property
    def worst(self) -> Row:
        """The row closest to its bound, or furthest beyond it."""
        return max(self.rows, key=lambda row: row.severity)


def verify_places(
    places: Sequence[Place], *, prepare: Callable[[], None] | None = None, report: Progress | None = None
) -> list[Report]:
    """Verify every place in every row.

    Args:
        places: the layouts of each case. A checkpoint of one is reloaded at the next.
        prepare: importable function that each of megarl's ranks calls first; the reference's processes do not. Tests
            use it to break something and see which row fails.
        report: called with lines of progress.

    Raises:
        ConfigError: there are more ranks than GPUs.
        MegarlError: a rank raised it.
    """
    check_gpus(max(place.config.parallel.world_size for place in places))
    cases = list({place.case.name: place.case for place in places}.values())
    truths = dict(zip([case.name for case in cases], run_shared(make_truth, cases, report), strict=True))
    by_place: dict[str, list[Finding]] = {place.key: [] for place in places}
    for world, stages in groupby(plan(places), lambda stage: stage.place.config.parallel.world_size):
        here = list(stages)
        for rank in run_ranks(run_stages, world, here, prepare=prepare, report=report):
            for key, findings in rank.items():
                by_place[key] += findings
    read = dict(zip([place.key for place in places], run_shared(read_back, list(places), report), strict=True))
    for place in places:
        by_place[place.key] += [finding for finding, _ in read[place.key]]
    yardsticks = _yardsticks(cases, places, by_place, report)
    reports = []
    for place in places:
        rule = place.case.rule
        yardstick = yardsticks.get(place.case.name, {})
        errors = {row: finding.error for row, finding in yardstick.items()}
        errors |= {finding.row: error for finding, error in read[place.key]}
        rows = [
            rule.judge_each(f, yardstick[f.row].parts)
            if f.row == EACH_GRADIENT
            else rule.judge(f, rule.yardstick(f.row, errors))
            for f in worst_of(by_place[place.key])
        ]
        rows.sort(key=lambda row: list(BOUNDS).index(row.name))
        reports.append(Report(place, rows, truths[place.case.name]))
    return _explained(reports, prepare, report)


def check_gpus(world: int) -> None:
    """Refuse more ranks than GPUs.

    Raises:
        ConfigError: a CUDA host has fewer GPUs than ranks.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() < world:
        raise ConfigError(
            f"the layout has {world} ranks, one GPU each, and this host has {torch.cuda.device_count()}; make "
            "parallel.* (or --ranks) smaller, or set CUDA_VISIBLE_DEVICES= to verify on the CPU"
        )


def plan(places: Sequence[Place]) -> list[Stage]:
    """Order the work of the ranks.

    First comes each place in full, by number of ranks; each checkpoint is reloaded at the case's next layout. Then the
    last checkpoints are reloaded, whatever the number of ranks of their next layout.
    """
    order = {place.layout: index for index, place in reversed(list(enumerate(places)))}
    stages: list[Stage] = []
    last: dict[str, Place] = {}
    for place in sorted(places, key=lambda p: (p.config.parallel.world_size, order[p.layout])):
        stages.append(Stage(place, resume=last.get(place.case.name)))
        last[place.case.name] = place
    return stages + [Stage(_next(place, places), full=False, resume=place) for place in last.values()]


def _next(saved: Place, places: Sequence[Place]) -> Place:
    """Choose where a case's last checkpoint is reloaded: another of its layouts with as many ranks, else any other."""
    world = saved.config.parallel.world_size
    for place in places:
        if place.case == saved.case and place.layout != saved.layout and place.config.parallel.world_size == world:
            return place
    most = max(world, 2)
    if torch.cuda.is_available():
        most = min(most, torch.cuda.device_count())
    other = other_layout(saved.config, most)
    if other is None:
        return Place(saved.case, f"{saved.layout} again, no other layout fits", saved.config)
    return Place(saved.case, place_name(other), other)


def _yardsticks(
    cases: Sequence[Case], places: Sequence[Place], by_place: dict[str, list[Finding]], report: Progress | None
) -> dict[str, dict[str, Finding]]:
    """Return case -> row -> the yardstick's finding, for cases in which a row exceeds its fixed bound."""
    needed = {
        place.case.name
        for place in places
        for f in by_place[place.key]
        if f.row not in (MERGED_WEIGHTS, EXPORTED_WEIGHTS) and place.case.rule.needs_yardstick(f)  # not judged by it
    }
    wanted = [case for case in cases if case.name in needed]
    return dict(zip([case.name for case in wanted], run_shared(make_yardstick, wanted, report), strict=True))


def _explained(reports: list[Report], prepare: Callable[[], None] | None, report: Progress | None) -> list[Report]:
    failed = [(r.place, [row for row in r.rows if not row.passed]) for r in reports if not r.passed]
    if not failed:
        return reports
    # Only MegatronModel's modules are traced; those of transformers are the reference's own.
    traced = [(place, rows) for place, rows in failed if place.config.model.backend != TRANSFORMERS]
    lines = explain(traced, prepare, report) if traced else {}
    return [Report(r.place, r.rows, r.truth, lines.get(r.place.key, [])) for r in reports]
