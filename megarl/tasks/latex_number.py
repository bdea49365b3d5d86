# SPDX-License-Identifier: Apache-2.0
"""LaTeX and plain ways of writing one number -> the number, where math-verify would not read them.

Only what surrounds a number is taken away: spacing, thousands separators, currency, degrees, units, a leading relation.
What is left is judged by math-verify as before.
"""

import re
from decimal import Decimal

# \, \; \: \> \! and the like, and Unicode's narrow and no-break spaces.
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
# Words that multiply are no unit.
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
    """Return an answer with what surrounds its number taken away; other answers keep their meaning.

    Args:
        answer: short; the work grows with its square.
    """
    text = SPACE.sub(" ", NEGATIVE_SPACE.sub("", answer))
    text = CURRENCY.sub("", ORDINAL.sub("", DEGREE.sub("", text)))
    text = " ".join(RELATION.sub("=", text).split())
    if not SCALED.search(text):
        text = LABEL.sub("", UNIT.sub("", text))
    text = text.strip()
    text = STYLE.sub(r"{\1}", text) if STYLE.fullmatch(text) else text
    text = WORDS.sub("", _unwrapped(text.removesuffix(".")))
    text = GROUPED.sub(lambda found: found[0].replace(" ", ""), text.removeprefix("=").strip())
    if found := SCIENTIFIC.fullmatch(text):
        text = f"{Decimal(found[1]).scaleb(int(found[2] or found[3])):f}"
    return text


def _unwrapped(text: str) -> str:
    """``text`` without the pairs of marks that are around the whole of it."""
    for left, right in WRAPPERS:
        inner = text[len(left) : -len(right)]
        if text.startswith(left) and text.endswith(right) and len(text) > len(left + right) and right not in inner:
            return _unwrapped(inner.strip())
    return text
