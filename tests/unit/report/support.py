# SPDX-License-Identifier: Apache-2.0
"""Write run folders for reports, and read their pages."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

EVIL = "</pre><script>document.documentElement.setAttribute('data-ran', '1'); console.error('ran')</script>\ud800\x00"
# As written for a conversation of two turns, with a token in between that was not drawn.
COMPARED = {
    "pieces": [EVIL, "given", ""],
    "drawn": [[0, 1], [2, 3]],
    "trainer_logprobs": [-0.5002, -0.25],
}


def compared(text: str, index: int) -> dict:
    """Return what is added to a row that the trainer computed too: the first and the last of eight."""
    return COMPARED | {"pieces": [text, *COMPARED["pieces"][1:]]} if index in (0, 7) else {}


AGES = {"staleness_mean": 0.75, "staleness_max": 1.0, "staleness/0": 0.25, "staleness/1": 0.75}
AGES |= {"repeated_groups": 1.0, "stale_groups": 0.0, "left_out_groups": 2.0}
AGES |= {"buffered_groups": 3.0, "running_groups": 4.0}


def make_run(folder: Path, steps: int = 5, rank: int = 8, stale: bool = False) -> Path:
    """Write the files that a run leaves."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"train: {{steps: {steps}}}\nlora: {{r: {rank}}}\ntask: {{name: '{EVIL[:40]}'}}\n"
    )
    rows = [
        {"step": step, "reward": step / 10, "task/correct": 0.5, "loss": -0.1, "grad_norm": 0.3, "entropy": 1.0,
         "response_tokens": 7.0, "mismatch_mean": 1e-4, "mismatch_max": 1e-2 * step, "groups_without_signal": 0.25,
         "truncated": 0.0, **(AGES if stale else {}), "seconds/sample": 3.0, "seconds/train": 2.0, f"task/{EVIL}": 1.0}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, value in ((0, 0.1), (steps, 0.6)):
        results = folder / "evaluations" / f"step-{step:06d}" / "results.json"
        results.parent.mkdir(parents=True)
        metrics = {"reward": {"value": value, "low": 0.05, "high": None}, EVIL: {"value": 0.5}}
        results.write_text(json.dumps({"step": step, "sets": {"held_out": {"prompts": 2, "metrics": metrics}}}))
    summary = {"reward_first": 0.1, "reward_last": 0.5, "grad_tensors": 28.0}
    after = {"held_out/reward": 0.6, "held_out/reward_low": 0.5, "held_out/reward_high": 0.7}
    summary |= {"eval_before": {"held_out/reward": 0.1}, "eval_after": after}
    (folder / "summary.json").write_text(json.dumps(summary))
    for step in range(1, steps + 1):
        completions = [
            {"prompt": EVIL, "messages": [{"role": "user", "content": EVIL}], "text": f"{EVIL} {index} of {step}",
             "reward": index / 10, "metrics": {EVIL: 1.0}, "advantage": [0.5, 1.0], "finish_reason": "stop",
             "version": step - 1, "logprobs": [-0.5, -1.25], **compared(f"{EVIL} {index} of {step}", index)}
            for index in range(8)
        ]  # fmt: skip
        file = folder / "rollouts" / f"step-{step:06d}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in completions))
    return folder


class Elements(HTMLParser):
    """Collects a page's elements, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")

    def handle_data(self, data):
        self.text += data


def figure(text: str, title: str) -> str:
    figures = re.findall("<figure>.*?</figure>", text, re.DOTALL)
    return next(figure for figure in figures if f"<figcaption>{title}</figcaption>" in figure)
