# SPDX-License-Identifier: Apache-2.0
"""Fill docs/api.md from the docstrings of megarl's public names (a mkdocs hook). Imports no torch."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megarl

PLACE = "<!-- public names -->"
ROOT = Path(megarl.__file__).resolve().parents[1]
# Headings of Google-style docstring sections. Their contents become a list.
HEADS = ("Args", "Attributes", "Returns", "Raises", "Yields")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the page; mkdocs calls this for every page."""
    return markdown.replace(PLACE, "\n".join(reference())) if PLACE in markdown else markdown


def reference() -> Iterator[str]:
    """Yield lines of Markdown: a section for each public name."""
    for name, module in megarl._HOMES.items():
        node = definition(module, name)
        yield from (f"## {name}", "", "```python", *signature(node), "```", "", *described(node), "")
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and described(method):
                    yield from (f"### {name}.{method.name}", "", "```python", *signature(method), "```", "")
                    yield from (*described(method), "")


def definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    """Return the class or function of a public name, following the imports of packages."""
    path = ROOT / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return definition(node.module, name)
    raise LookupError(f"{module} neither defines nor imports {name}")


def signature(node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """Yield the first lines of a class or function as ast writes them; for a class also those of its ``__init__``."""
    if isinstance(node, ast.FunctionDef):
        bare = ast.FunctionDef(**{**vars(node), "body": [ast.Expr(ast.Constant(...))]})
        yield ast.unparse(bare).replace("\n    ...", " ...")
        return
    yield f"class {node.name}"
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            yield from (f"    {line}" for line in signature(item))


def described(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Return the docstring as Markdown, for a class also that of its ``__init__``."""
    texts = [ast.get_docstring(node)]
    texts += [ast.get_docstring(item) for item in node.body if getattr(item, "name", "") == "__init__"]  # type: ignore[arg-type]
    return [line for text in texts if text for line in [*markdown_of(text), ""]]


def markdown_of(docstring: str) -> Iterator[str]:
    """Convert a docstring: Google-style sections become lists, double backquotes single ones."""
    within = False
    for line in docstring.replace("``", "`").splitlines():
        head = re.fullmatch(rf"({'|'.join(HEADS)}):", line)
        within = bool(head) or (within and (not line or line.startswith(" ")))
        if head:
            yield from (f"**{head[1]}**", "")
        elif within and (item := re.fullmatch(r"    (\S[^:]*): (.*)", line)):
            yield f"- `{item[1]}`: {item[2]}".replace("``", "`")
        elif within and re.match(r"    \S", line):
            yield f"- {line.strip()}"
        elif within:
            yield f"  {line.strip()}" if line else ""
        else:
            yield line
