# SPDX-License-Identifier: Apache-2.0
"""Rewrite LaTeX and plain forms of a number that math-verify would not read.

Only text around a number is removed: spacing, thousands separators, currency, degrees, units, a leading relation.
math-verify then judges the rest.
"""

import re
from decimal import Decimal

# \, \; \: \> \! and similar commands, and Unicode's narrow and no-break spaces.
SPACE = re.compile(
    r"\\[,;:> ]|\\(?:thinspace|medspace|thickspace|quad|qquad|space|displaystyle)(?![a-zA-Z])|[~\xa0\u2009\u202f]"
)
NEGATIVE_SPACE = re.compile(r"\\!|\\negthinspace(?![a-zA-Z])")
DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|°")
ORDINAL = re.compile(r"\^\s*\{?\s*\\(?:text|mathrm)\{(?:st|nd|rd|th)\}\s*\}?")
CURRENCY = re.compile(r"\\text\{\\\$\}|\\pounds(?![a-zA-Z])|\\euro(?![a-zA-Z])|[€£¥]")
RELATION = re.compile(r"\\(?:approx|simeq|sim|cong|equiv)(?![a-zA-Z])|≈")
STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boldsymbol|bm|bf|underline)\s*\{([^{}]*)\}")
# A unit at the end, with its power; words at the beginning.
UNIT = re.compile(
    r"(?<=[0-9.}])\s*\\(?:text|textbf|mathrm|operatorname)\s*\{[^{}0-9]*\}(?:\s*\^\s*(?:[0-9]|\{[0-9]\}))?\s*$"
)
LABEL = re.compile(r"^\s*\\(?:text|textbf|mathrm)\s*\{[^{}0-9$]*\}")
# Words that multiply the number, so they are not units.
SCALES = r"hundreds?|thousands?|millions?|billions?|dozens?|scores?|pi|half|squared|cubed"
WORDS = re.compile(
    rf"(?<=[0-9])\s+(?!(?:{SCALES})\b)[A-Za-z]{{2,}}(?:\s+(?!(?:{SCALES})\b)[A-Za-z]+)*\s*$", re.IGNORECASE
)
SCALED = re.compile(rf"\{{\s*(?:{SCALES})\b", re.IGNORECASE)
GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9]| [0-9])")
SCIENTIFIC = re.compile(
    r"(-?[0-9]+(?:\.[0-9]+)?)\s*(?:\\times|\\cdot|\u00d7)\s*10\s*\^\s*(?:([0-9])|\{\s*(-?[0-9]{1,2})\s*\})"
)
WRAPPERS = (("$", "$"), ("\\(", "\\)"), ("**", "**"), ("{", "}"))


def tidy(answer: str) -> str:
    """Remove what surrounds the number of an answer. Other answers keep their meaning.

    Args:
        answer: a short text, since the work grows with the square of its length.
    """
    text = SPACE.sub(" ", NEGATIVE_SPACE.sub("", answer))
    text = CURRENCY.sub("", ORDINAL.sub("", DEGREE.sub("", text)))
    text = " ".join(RELATION.sub("=", text).split())
    if not SCALED.search(text):
        text = LABEL.sub("", UNIT.sub("", text))
    text = text.strip()
    text = STYLE.sub(r"{\1}", text) if STYLE.fullmatch(text) else text
    text = WORDS.sub("", _unwrapped(text.removesuffix(".")))
    text = GROUPED.sub(lambda match: match[0].replace(" ", ""), text.removeprefix("=").strip())
    if match := SCIENTIFIC.fullmatch(text):
        text = f"{Decimal(match[1]).scaleb(int(match[2] or match[3])):f}"
    return text


def _unwrapped(text: str) -> str:
    """Remove the pairs of marks that enclose the whole of ``text``."""
    for left, right in WRAPPERS:
        inner = text[len(left) : -len(right)]
        if text.startswith(left) and text.endswith(right) and len(text) > len(left + right) and right not in inner:
            return _unwrapped(inner.strip())
    return text
