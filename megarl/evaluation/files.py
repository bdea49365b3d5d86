# SPDX-License-Identifier: Apache-2.0
"""Write an evaluation into a run folder: its results, and every completion."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megarl.evaluation.results import SetResult
from megarl.files import write_directory, write_text, writing
from megarl.run_folder import EVALUATIONS, RESULTS, STEP


def write_evaluation(
    run: Path, step: int, version: int, results: Mapping[str, SetResult], completions: Mapping[str, Callable[..., Any]]
) -> None:
    """Write ``evaluations/step-NNNNNN``; an older one of the step is replaced.

    Args:
        run: the run folder.
        step, version: what was evaluated.
        results: of each set by its key.
        completions: set's key -> function: file -> None, which writes the set's completions.

    Raises:
        CheckpointError: it cannot be written.
    """
    folder = run / EVALUATIONS / STEP.format(step)
    with writing(folder), write_directory(folder) as partial:
        for key, write in completions.items():
            write(partial / f"{key}.jsonl")
        sets = {key: result.to_json() for key, result in results.items()}
        write_text(partial / RESULTS, json.dumps({"step": step, "version": version, "sets": sets}, indent=1) + "\n")
