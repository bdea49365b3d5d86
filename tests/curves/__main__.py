# SPDX-License-Identifier: Apache-2.0
"""Train the quickstart's task at several values of train.max_staleness and seeds, and plot the rewards in one picture.

    python -m tests.curves FOLDER [--staleness 0,1,4] [--seeds 0,1,2] [key=value ...]

A run takes ten minutes on two idle cores. FOLDER/staleness.json keeps each finished run, and FOLDER/staleness.png shows
them, so the command may be interrupted and repeated: it trains only what the file lacks.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.curves.picture import draw
from tests.helpers.train_run import ROOT, read_rows

# Of each row.
KEPT = ("step", "reward", "staleness_mean", "mismatch_mean", "entropy", "seconds")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the number of runs that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.curves", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--staleness", type=numbers, default=[0, 1, 4])
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("settings", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    file, failed = given.folder / "staleness.json", 0
    given.folder.mkdir(parents=True, exist_ok=True)
    # Seed by seed, so that an interrupted command has curves to compare.
    for seed in given.seeds:
        for staleness in given.staleness:
            runs = json.loads(file.read_text()) if file.is_file() else []
            if any((run["staleness"], run["seed"]) == (staleness, seed) for run in runs):
                continue
            rows = train(staleness, seed, given.settings)
            failed += rows is None
            if rows is not None:
                runs.append({"staleness": staleness, "seed": seed, "settings": given.settings, "rows": rows})
                runs.sort(key=lambda run: (run["staleness"], run["seed"]))
                file.write_text(json.dumps(runs, indent=1) + "\n")
                draw(runs, file.with_suffix(".png"))
    return failed


def numbers(text: str) -> list[int]:
    """Return the numbers between commas."""
    return [int(number) for number in text.split(",")]


def train(staleness: int, seed: int, settings: list[str]) -> list[dict[str, Any]] | None:
    """Return the kept metrics of one run; None if it failed."""
    print(f"train.max_staleness={staleness}, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        chosen = [f"train.max_staleness={staleness}", f"train.seed={seed}", f"sampler.seed={seed}"]
        # Timing decides what an asynchronous run decodes together.
        chosen += [f"sampler.reproducible={str(staleness == 0).lower()}", f"train.output={folder}", *settings]
        done = subprocess.run(["bash", "scripts/quickstart.sh", *chosen], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            print(f"failed: {(done.stdout + done.stderr)[-2000:]}", flush=True)
            return None
        [run] = Path(folder).iterdir()
        rows = [{name: row[name] for name in KEPT if name in row} for row in read_rows(run)]
        print(f"  reward {rows[0]['reward']:.3f} -> {rows[-1]['reward']:.3f}", flush=True)
        return rows


if __name__ == "__main__":
    sys.exit(main())
