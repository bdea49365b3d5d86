# SPDX-License-Identifier: Apache-2.0
"""Build tiny models and cases for ``megarl.verify``."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tests.helpers.ranks  # noqa: F401  (ranks import pytest with the functions that break megarl in them)
from megarl.config import RunConfig, parse_config
from megarl.verify.bounds import BFLOAT16_ONLY, BOUNDS
from megarl.verify.cases import Case, Place
from megarl.verify.compare import Finding
from megarl.verify.inputs.adapters import make_adapter
from megarl.verify.inputs.settings import TEMPERATURE, verify_tree
from megarl.verify.run import Report
from tests.helpers.models import make_model

# Rows of a float32 report, in its order.
FLOAT32_ROWS = [row for row in BOUNDS if row not in BFLOAT16_ONLY]


def make_config(
    model: Path, layout: dict[str, Any] | None = None, dtype: str = "float32", temperature: float = 1.0
) -> RunConfig:
    """Return the config with which ``megarl verify`` runs a model. Small micro-batches make several per step.

    Args:
        model: Hugging Face folder.
        layout: the ``parallel`` section; also keys of ``train``, and ``backend`` of the ``model`` section.
        dtype: ``model.dtype``.
        temperature: temperature of the policy.
    """
    layout, tree = layout or {}, verify_tree(model)
    tree["sampler"]["temperature"] = temperature
    tree["model"] |= {"dtype": dtype, "backend": layout.get("backend", "local")}
    tree["train"] |= layout.get("train", {})
    tree["parallel"] = {axis: size for axis, size in layout.items() if axis not in ("train", "backend")}
    return parse_config(tree)


def make_case(
    folder: Path,
    name: str,
    *,
    adapter: dict[str, Any] | None = None,
    adapter_seed: int = 4,
    dtype: str = "float32",
    **model: Any,
) -> Case:
    """Make a random model (``model`` goes to ``make_model``) and a random adapter (``adapter`` goes to PEFT)."""
    path = make_model(folder / name / "model", dtype=dtype, **model)
    made = make_adapter(path, folder / name / "adapter", seed=adapter_seed, **adapter or {})
    return Case(name, make_config(path, dtype=dtype, temperature=TEMPERATURE), made, folder / name / "work")


def place(case: Case, name: str, layout: dict[str, Any]) -> Place:
    """Return a case at a layout, given as for ``make_config``."""
    return Place(case, name, make_config(case.model, layout, case.dtype, case.temperature))


def check(reports: Sequence[Report]) -> None:
    """Assert that every row is within its fixed bound, whatever Hugging Face's own rounding error."""
    worst = max(((r, row) for r in reports for row in r.rows), key=lambda pair: pair[1].severity)
    print(f"\n{len(reports)} places, worst {worst[0].place.key}: {worst[1]}")
    rows = [(report, row) for report in reports for row in report.rows]
    failed = [(r.place.key, row, r.differences) for r, row in rows if not row.error <= BOUNDS[row.name]]
    assert not failed, failed[:10]


def outside(findings: Iterable[Finding]) -> dict[str, str]:
    """Map the rows of findings outside their fixed bounds to their worst tensors."""
    return {finding.row: finding.worst for finding in findings if not finding.error <= BOUNDS[finding.row]}
