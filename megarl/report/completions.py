# SPDX-License-Identifier: Apache-2.0
"""Show sample completions: prompt, reward, and text, each token coloured by how far sampler and trainer are apart."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megarl.report import charts
from megarl.report.runs import RunRecord, is_number, read_completions
from megarl.report.text import escaped

# Most completions of a step, characters of a text, and tokens of a completion that are shown.
COMPLETIONS, CHARACTERS, TOKENS = 6, 4000, 400
# Differences in nats: none of a colour, and all of it; between them it grows with the logarithm.
FAINTEST, STRONGEST = 1e-3, 1.0
# Backgrounds, red, green and blue: the sampler's logprob is the greater one, and the smaller one.
ABOVE, BELOW = "213,94,0", "0,114,178"
NO_TEXT = "\u25ab"  # stands for a token that adds no character: a special token, or a part of a character
LEGEND = (
    "<p>Tokens of a completion that the trainer computed too are coloured by the difference of their "
    f'logprobs: <span style="background:rgba({ABOVE},.67)">the sampler\'s is greater</span> '
    f'<span style="background:rgba({BELOW},.67)">the trainer\'s is greater</span>, none below {FAINTEST:g} nats, all '
    f"from {STRONGEST:g} on; numbers on hover. The trainer's are of the version that the step began with.</p>"
)


def chosen_steps(held: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return the steps to show: those wanted that are held, or else the first, a middle and the last one."""
    if wanted:
        return [step for step in wanted if step in held]
    return sorted({held[0], held[len(held) // 2], held[-1]}) if held else []


def completions(run: RunRecord, wanted: Sequence[int]) -> str:
    """Return the completions of some steps; adds to the run's notes.

    Args:
        run: the run.
        wanted: the steps; none for the first, a middle and the last one.
    """
    steps = chosen_steps(list(run.rollouts), wanted)
    if missing := [str(step) for step in wanted if step not in steps]:
        run.notes.append(f"there are no completions of step {', '.join(missing)}")
    parts = []
    for step in steps:
        rows, problem = read_completions(run.rollouts[step], COMPLETIONS)
        if problem:
            run.notes.append(problem)
        body = "".join(map(_completion, rows)) or '<p class="empty">no completions</p>'
        parts.append(f"<details open><summary>{escaped(run.label)}, step {step}</summary>{body}</details>")
    return "".join(parts) or f'<p class="empty">{escaped(run.label)}: no completions</p>'


def _completion(row: dict[str, Any]) -> str:
    """Show one completion: prompt, text, reward with its metrics, and each token's logprob."""
    messages = row.get("messages")
    asked = [m.get("content", "") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    facts = {name: row.get(name) for name in ("reward", "advantage", "finish_reason", "version")}
    facts |= row["metrics"] if isinstance(row.get("metrics"), dict) else {}
    logprobs, pairs = _numbers(row, "logprobs"), _pairs(row)
    if pairs:
        facts["largest |sampler - trainer|"] = max(abs(pair[0] - pair[1]) for pair in pairs if pair is not None)
    shown = ", ".join(f"{name} {_short(value)}" for name, value in facts.items() if value is not None)
    strip = charts.strip(logprobs[:TOKENS], "logprob of each token under the sampler") if logprobs else ""
    text = _coloured(row["pieces"], pairs) if pairs else f"<pre>{escaped(_cut(row['text']))}</pre>"
    title = f"<b>{escaped(row.get('prompt', '?'))}</b>: {escaped(shown)}"
    question = f"<pre>{escaped(_cut(chr(10).join(map(str, asked))))}</pre>"
    return f"<details open><summary>{title}</summary>{question}{text}{strip}</details>"


def _pairs(row: dict[str, Any]) -> list[tuple[float, float] | None]:
    """Return the logprobs under sampler and trainer of each token, None for one that was not drawn.

    Empty if the row does not have both, or its parts do not fit together.
    """
    pieces, sampler, trainer = row.get("pieces"), _numbers(row, "logprobs"), _numbers(row, "trainer_logprobs")
    if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces) or not trainer:
        return []
    spans = row.get("drawn", [[0, len(pieces)]])
    try:
        edges = [int(edge) for begin, end in spans for edge in (begin, end)]
    except (TypeError, ValueError, OverflowError):
        return []
    if not all(a <= b for a, b in pairwise([0, *edges, len(pieces)])):
        return []
    places = [place for begin, end in zip(edges[::2], edges[1::2], strict=True) for place in range(begin, end)]
    if not len(places) == len(sampler) == len(trainer):
        return []
    pairs: list[tuple[float, float] | None] = [None] * len(pieces)
    for place, *pair in zip(places, sampler, trainer, strict=True):
        pairs[place] = (pair[0], pair[1])
    return pairs


def _coloured(pieces: Sequence[str], pairs: Sequence[tuple[float, float] | None]) -> str:
    """Return the text of tokens, each in an element that says its numbers."""
    tokens = "".join(_token(*each) for each in zip(range(1, TOKENS + 1), pieces, pairs, strict=False))
    left = len(pieces) - TOKENS
    return f'<pre class="tokens">{tokens}{f" ... ({left} more tokens)" if left > 0 else ""}</pre>'


def _token(number: int, piece: str, pair: tuple[float, float] | None) -> str:
    text = escaped(piece or NO_TEXT)
    if pair is None:
        return f'<span class="given" title="token {number}: not drawn">{text}</span>'
    sampler, trainer = pair
    difference = sampler - trainer
    size = math.log(max(abs(difference), FAINTEST) / FAINTEST) / math.log(STRONGEST / FAINTEST)
    colour = f"rgba({ABOVE if difference > 0 else BELOW},{min(size, 1.0):.2f})"
    said = f"token {number}: sampler {sampler:.4f}, trainer {trainer:.4f}, difference {difference:+.2e}"
    return f'<span style="background:{colour}" title="{said}">{text}</span>'


def _numbers(row: dict[str, Any], name: str) -> list[float]:
    """Return a list of numbers; an empty one if it is none, or one of them is not finite."""
    given = row.get(name)
    return given if isinstance(given, list) and all(map(is_number, given)) else []


def _short(value: Any) -> str:
    if is_number(value):
        return f"{value:.4g}"
    return f"{len(value)} values" if isinstance(value, list) else str(value)[:80]


def _cut(text: str) -> str:
    left = len(text) - CHARACTERS
    return text if left <= 0 else f"{text[:CHARACTERS]} ... ({left} more characters)"
