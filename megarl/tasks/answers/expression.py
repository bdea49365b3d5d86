# SPDX-License-Identifier: Apache-2.0
"""Evaluate short arithmetic that a model wrote, exactly and safely: nothing is executed."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_DIGITS = 12  # of one number; keeps every intermediate value small
ALLOWED = re.compile(r"[0-9+\-*/() \n\t]*", re.ASCII)

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Evaluate whole numbers combined by ``+ - * /``, unary minus and parentheses.

    The text is parsed, never run. Only the syntax above is accepted, and at most ``MAX_CHARACTERS`` characters, so
    ``9**9**9`` or a call costs nothing.

    Args:
        text: the expression.

    Returns:
        The exact value, and the numbers used, in the order in which they are written.

    Raises:
        ValueError: the text is anything else, or divides by zero.
    """
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    if not ALLOWED.fullmatch(text):
        raise ValueError("an expression holds whole numbers, + - * / and parentheses only")
    try:
        # A newline ends an expression in Python, but not in written arithmetic.
        tree = ast.parse(" ".join(text.split()), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:  # the last two mean: nested too deeply
        raise ValueError(f"not an expression: {error}") from error
    numbers: list[int] = []
    return _value(tree.body, numbers), numbers


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    """Return the value of a node; appends its numbers to ``numbers``."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        if node.value >= 10**MAX_DIGITS:
            raise ValueError(f"a number has more than {MAX_DIGITS} digits")
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        if isinstance(node.op, ast.Div) and right == 0:
            raise ValueError("division by zero")
        return OPERATORS[type(node.op)](left, right)
    raise ValueError(f"{type(node).__name__} is not allowed; use + - * / and parentheses")
