# SPDX-License-Identifier: Apache-2.0
"""Read data files: JSONL, parquet or CSV in, validated rows out, every bad row counted.

A task that reads rows declares a ``Row`` with the fields that it needs, and calls ``read_rows``.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from megarl.errors import DataError, UnsupportedError, first_few, nearest

MAX_SHOWN = 60  # characters of a wrong value that are shown


class Row(BaseModel):
    """Base of row models: exact types, other columns ignored. A field's validator raises ``ValueError``."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text


Text = Annotated[str, AfterValidator(_not_blank)]  # a string that is not only white space

RowModel = TypeVar("RowModel", bound=Row)


class _BadRow(Exception):
    """A row that cannot be decoded, with the reason."""


def read_rows(file: Path, model: type[RowModel]) -> list[RowModel]:
    """Read and validate every row of a file.

    Args:
        file: path of a ``.jsonl`` file (one JSON object per line, UTF-8), a ``.parquet`` file, or a ``.csv`` file
            (UTF-8; the first line names the columns; a cell of a field that is no string is read as JSON).
        model: the model of a row.

    Returns:
        All rows, in file order. None is ever dropped.

    Raises:
        DataError: the file cannot be read, has no rows, or has malformed rows. The message gives the number of bad rows
            and, for the first few, the row number (from 1; in JSONL the line), the field and the reason.
        UnsupportedError: the file has another format.
    """
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".csv": _read_csv}
    if file.suffix not in readers:
        raise UnsupportedError(f"{file} is not a {', '.join(readers)} file; convert it to one of them")
    return rows_of(readers[file.suffix](file, model), model, str(file))


def rows_of(raw_rows: Iterable[Any], model: type[RowModel], source: str) -> list[RowModel]:
    """Validate rows, as ``read_rows``.

    Args:
        raw_rows: dictionaries, column -> value.
        model: the model of a row.
        source: where they come from, for messages.
    """
    rows: list[RowModel] = []
    problems: list[str] = []
    count = 0
    try:
        for count, raw in enumerate(raw_rows, start=1):
            row = _validate(raw, model)
            if isinstance(row, str):
                problems.append(f"row {count}{row}")
            else:
                rows.append(row)
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error}") from error
    if problems:
        verb = "is" if len(problems) == 1 else "are"
        raise DataError(f"{source}: {len(problems)} of {count} rows {verb} bad\n{first_few(problems)}")
    if not rows:
        raise DataError(f"{source} holds no rows")
    return rows


def _columns(model: type[Row]) -> list[str]:
    """List the columns that a row must have."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _validate(raw: Any, model: type[RowModel]) -> RowModel | str:
    """Return the row, or a description of its mistakes."""
    if isinstance(raw, _BadRow):
        return f": {raw}"
    if not isinstance(raw, dict):
        return f": is {_shown(raw)}; it must be an object with {', '.join(_columns(model))}"
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        return "; ".join(_explain(problem, raw) for problem in error.errors())


def _explain(problem: Any, raw: dict) -> str:
    field = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f", field '{field}': is missing{nearest(field, raw)} (the row has: {', '.join(raw) or 'nothing'})"
    reason = problem.get("ctx", {}).get("error") or problem["msg"][:1].lower() + problem["msg"][1:]
    return f", field '{field}': is {_shown(problem['input'])}; {reason}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _read_jsonl(file: Path, model: type[Row]) -> Iterator[Any]:
    with file.open("rb") as lines:
        for line in lines:
            try:
                text = line.decode("utf-8")
                yield json.loads(text) if text.strip() else _BadRow("is an empty line; remove it")
            except UnicodeDecodeError as error:
                yield _BadRow(f"is not UTF-8 ({error.reason} at byte {error.start})")
            except json.JSONDecodeError as error:
                yield _BadRow(f"is not JSON ({error.msg} at column {error.colno}): {_shown(text.strip())}")
            except (ValueError, RecursionError) as error:  # a number with thousands of digits, or thousands of brackets
                yield _BadRow(f"is not JSON that can be read ({error})")


def _read_parquet(file: Path, model: type[Row]) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            present = table.schema_arrow.names
            columns = [name for name in _columns(model) if name in present]
            if len(columns) < len(model.model_fields) or model.model_config.get("extra") == "allow":
                columns = present  # read all columns, so that the message can list them
            for batch in table.iter_batches(columns=columns):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} is not a readable parquet file (truncated?): {error}") from error


def _read_csv(file: Path, model: type[Row]) -> Iterator[Any]:
    typed = {field.alias or name for name, field in model.model_fields.items() if field.annotation not in (str, Any)}
    csv.field_size_limit(2**31 - 1)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            table = csv.reader(lines, strict=True)
            header = next(table, [])
            if twice := sorted({name for name in header if header.count(name) > 1}):
                raise DataError(f"{file} names column '{twice[0]}' twice in its first line; rename one")
            for cells in table:
                if len(cells) != len(header):
                    yield _BadRow(f"has {len(cells)} cells; the first line names {len(header)} columns")
                    continue
                row = dict(zip(header, cells, strict=True))
                yield row | {name: _from_cell(row[name]) for name in typed & row.keys()}
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
    except csv.Error as error:
        raise DataError(f"{file} is not a readable CSV file (line {table.line_num}): {error}") from error


def _from_cell(cell: str) -> Any:
    """Return the value of a cell of a field that is no string; the cell itself if it is not JSON."""
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell
