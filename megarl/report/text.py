# SPDX-License-Identifier: Apache-2.0
"""Escape untrusted text for HTML."""

import html
import re
from typing import Any

# Control characters other than tab and line feed, and halves of surrogate pairs, which UTF-8 cannot hold.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escaped(value: Any) -> str:
    """Return the text of a value for an element or a quoted attribute of HTML."""
    return html.escape(UNPRINTABLE.sub("\ufffd", str(value)))
