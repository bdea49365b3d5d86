# SPDX-License-Identifier: Apache-2.0
"""Evaluate runs, adapters and models side by side (`megarl eval`)."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cli.progress import progress
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from megarl.cli.target import Target
    from megarl.config import RunConfig
    from megarl.evaluation.results import SetResult


# Columns of a table that goes to a file.
WIDE = 250


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `eval` to the command line."""
    parser = commands.add_parser(
        "eval",
        help="evaluate runs, adapters or models, with confidence intervals",
        description="Evaluate runs, adapters or models side by side on the same prompts; prints a table with 95% "
        "intervals. Without --task: on the sets of the first run named. Settings are those of that run.",
    )
    parser.add_argument("sources", metavar="TARGET", nargs="+", help="RUN, RUN@STEP, PEFT directory, model or hub id")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings to change")
    parser.add_argument(
        "--task",
        dest="tasks",
        action="append",
        default=[],
        metavar="NAME|{...}",
        help="a task's name or an entry of eval.tasks in YAML; may be given several times",
    )
    parser.add_argument("--json", dest="file", metavar="FILE", help="also write all numbers as JSON")
    parser.set_defaults(run=evaluate, online=True, late="sources")


def evaluate(arguments: argparse.Namespace) -> None:
    """Evaluate, and print the table.

    Raises:
        ConfigError: a target, a task or an option is wrong.
        MegarlError: evaluating failed.
    """
    from rich.console import Console
    from rich.table import Table

    from megarl.evaluation import table
    from megarl.files import user_path, write_text, writing

    file = user_path("--json", arguments.file) if arguments.file else None
    if file and (file.is_dir() or not file.parent.is_dir()):
        raise ConfigError(f"--json is '{arguments.file}'; name a file in a folder that exists")
    entries = [text if text.lstrip().startswith("{") else f"{{name: {json.dumps(text)}}}" for text in arguments.tasks]
    given = [f"eval.tasks=[{', '.join(entries)}]"] if entries else []
    with progress("reading the targets") as report:
        targets, config = _find(arguments.sources, arguments.overrides, given)
        targets = [target if target.run else target.like(config.model) for target in targets]
        results = evaluate_targets(targets, config, bool(given), report)
    head, lines = table.rows(results)
    shown = Table(*head, box=None, pad_edge=False)
    for line in lines:
        shown.add_row(*line)
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(shown)
    if file:
        with writing(file, ConfigError):
            write_text(file, json.dumps(table.as_json(results), indent=1) + "\n")


def _find(sources: Sequence[str], overrides: Sequence[str], tasks: Sequence[str]) -> tuple[list["Target"], "RunConfig"]:
    """Return the targets, and the config that gives the settings: that of the first run, or else of the first target.

    Only that one gets all overrides. What another target's config would make of them does not matter.
    """
    from megarl.cli.target import find_target, is_run

    leading = next((text for text in sources if is_run(text)), sources[0])
    of_model = [override for override in overrides if override.startswith("model.")]
    targets = {text: find_target(text, [*overrides, *tasks] if text == leading else of_model) for text in sources}
    return list(targets.values()), targets[leading].config


def evaluate_targets(
    targets: Sequence["Target"], config: "RunConfig", only_named: bool, report: Callable[[str], None]
) -> Mapping[str, Mapping[str, "SetResult"]]:
    """Evaluate targets; return label -> set -> result.

    Args:
        targets: what to evaluate. Those of one base model share an engine.
        config: gives the sets, the run's task and the sampler's settings.
        only_named: leave out the held-out prompts unless ``eval.tasks`` names them.
        report: shows what is being done.
    """
    from megarl.cli.target import engine_logs

    entries = config.eval.tasks if only_named else config.evaluations
    if not entries:
        raise ConfigError("there is nothing to evaluate on: no run named has eval.tasks or task.held_out; give --task")
    results: dict[str, Any] = {}
    with engine_logs() as logs:
        for model in dict.fromkeys(target.config.model for target in targets):
            same = [target for target in targets if target.config.model == model]
            results |= _evaluate_model(same, config, entries, logs, report)
    return {target.label: results[target.label] for target in targets}


def _evaluate_model(
    targets: Sequence["Target"], config: "RunConfig", entries: Sequence[Any], logs: Path, report: Callable[[str], None]
) -> dict[str, Any]:
    from megarl.cli.target import TargetEngine
    from megarl.controller.actors.logs import log_file
    from megarl.controller.rollouts.evaluation import Evaluation
    from megarl.controller.rollouts.rewarding.judges import dry_response, start_judge
    from megarl.evaluation.sets import build_sets
    from megarl.hub import offline_children
    from megarl.tasks import TaskContext, build_task
    from megarl.tasks.prompting import without_long
    from megarl.tokenizer import load_tokenizer

    report("reading the prompts")
    context = TaskContext(config.task, Path.cwd(), config.train.seed)
    tokenizer = load_tokenizer(targets[0].config.model.path)

    def task_of_run() -> Any:
        task = build_task(context)
        if config.task.long_prompts != "drop":
            return task
        # The held-out prompts of the run are the last of those that it kept, by its own model's tokens.
        of_run = load_tokenizer(config.model.path)
        return without_long(task, of_run, config.task, config.sampler.max_prompt_tokens)

    sets = build_sets(config, Path.cwd(), tokenizer, task_of_run, entries)
    of_run = [one for one in sets if one.context is None]
    with offline_children():
        model = targets[0].config.model.path
        judge = start_judge(context, log_file(logs, "rewards"), model, of_run[0].plays) if of_run else None
        evaluation = Evaluation(
            sets, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), config.sampler.seed, logs, model, judge
        )
        try:
            evaluation.dry_run(dry_response(tokenizer))
            report("starting vLLM")
            with TargetEngine(targets, config, logs / "engine.log") as engine:
                results = {}
                for version, target in enumerate(targets):
                    engine.load(target, version)
                    report(f"evaluating {target.label}")
                    evaluated = evaluation.run(engine, version)
                    results[target.label] = {key: one.result for key, one in evaluated.items()}
                return results
        finally:
            evaluation.close()
            if judge:
                judge.close()
