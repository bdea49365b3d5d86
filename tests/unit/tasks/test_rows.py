# SPDX-License-Identifier: Apache-2.0
"""Test read_rows: it returns what a file holds, and each mistake is one error that loses no row."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megarl.errors import DataError, UnsupportedError
from megarl.tasks.gsm8k import Gsm8kRow
from megarl.tasks.rows.files import Row, Text, read_rows
from tests.unit.tasks.support import make

SAMPLE = Path(__file__).parents[3] / "examples" / "gsm8k" / "sample.jsonl"
GOOD = {"question": "How many?", "answer": "#### 3"}


class Pair(Row):
    name: Text
    count: int


def write(folder, lines, name="rows.jsonl"):
    file = folder / name
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text(text + "\n", encoding="utf-8")
    return file


def message_of(file, model=Gsm8kRow, error=DataError):
    with pytest.raises(error) as caught:
        read_rows(file, model)
    return str(caught.value)


def test_jsonl_and_parquet_give_the_same_rows(tmp_path):
    raw = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    parquet = tmp_path / "sample.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(raw), parquet, row_group_size=5)
    rows = read_rows(SAMPLE, Gsm8kRow)
    assert [row.model_dump() for row in rows] == raw
    assert read_rows(parquet, Gsm8kRow) == rows


def test_another_task_needs_only_a_row_model(tmp_path):
    file = write(tmp_path, [{"name": "ä", "count": 1, "other": [1]}, {"count": 2, "name": "b"}])
    assert [(row.name, row.count) for row in read_rows(file, Pair)] == [("ä", 1), ("b", 2)]


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"question": "q"}, "row 2, field 'answer': is missing (the row has: question)"),
        ({"question": "q", "anwser": "#### 3"}, "field 'answer': is missing; did you mean 'anwser'?"),
        ({"question": 3, "answer": "#### 3"}, "row 2, field 'question': is 3; input should be a valid string"),
        ({"question": None, "answer": "#### 3"}, "field 'question': is None; input should be a valid string"),
        ({"question": " \n", "answer": "#### 3"}, "field 'question': is ' \\n'; it is empty"),
        ({"question": "q", "answer": "3"}, "field 'answer': is '3'; it must end with '#### <number>'"),
        ({"question": "q", "answer": "#### three"}, "'three' after #### is not a number"),
        ({"question": "q", "answer": "x ####"}, "'' after #### is not a number"),
        ({"question": "q", "answer": "#### 1e5"}, "'1e5' after #### is not a number"),
        ('{"question": "q", "answer": "#### 3"', "row 2: is not JSON"),
        ("question,answer", "row 2: is not JSON"),
        ("", "row 2: is an empty line"),
        ("[1, 2]", "row 2: is [1, 2]; it must be an object with question, answer"),
        ("null", "row 2: is None; it must be an object"),
        ("[" * 100_000, "row 2: is not JSON"),
        ('{"question": ' + "9" * 10_000 + "}", "row 2: is not JSON that can be read"),
    ],
)
def test_a_bad_row_is_named_by_file_row_and_field(tmp_path, row, part):
    file = write(tmp_path, [GOOD, row, GOOD])
    message = message_of(file)
    assert message.startswith(f"{file}: 1 of 3 rows is bad\n")
    assert part in message
    assert len(message) < 400


def test_all_bad_rows_are_counted_and_the_first_five_listed(tmp_path):
    file = write(tmp_path, [GOOD if i % 3 == 0 else {"question": ""} for i in range(30)])
    lines = message_of(file).splitlines()
    assert lines[0] == f"{file}: 20 of 30 rows are bad"
    assert [line.split(",")[0].strip() for line in lines[1:6]] == ["row 2", "row 3", "row 5", "row 6", "row 8"]
    assert all("field 'question'" in line and "field 'answer'" in line for line in lines[1:6])
    assert lines[6:] == ["  and 15 more"]


def test_bytes_that_are_not_text_are_one_bad_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    assert "1 of 2 rows is bad\n  row 2: is not UTF-8" in message_of(file)


def test_no_final_newline_and_crlf_are_fine(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\r\n".join([json.dumps(GOOD).encode()] * 2))
    assert len(read_rows(file, Gsm8kRow)) == 2


def test_a_truncated_parquet_is_named(tmp_path):
    whole = tmp_path / "whole.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD] * 1000), whole)
    content = whole.read_bytes()
    for keep in (0, 3, len(content) // 2, len(content) - 1):
        file = tmp_path / f"cut{keep}.parquet"
        file.write_bytes(content[:keep])
        assert str(file) in message_of(file)


def test_a_damaged_parquet_page_is_named(tmp_path):
    file = tmp_path / "damaged.parquet"
    rows = [{"question": f"{i}", "answer": f"#### {i}"} for i in range(1000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, compression="gzip")
    content = bytearray(file.read_bytes())
    content[60:400] = bytes(340)
    file.write_bytes(content)
    assert str(file) in message_of(file)


def test_parquet_rows_are_checked_like_jsonl_rows(tmp_path):
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["q", None, " "], "anwser": ["#### 1"] * 3}), file)
    message = message_of(file)
    assert "3 of 3 rows are bad" in message
    assert "row 1, field 'answer': is missing; did you mean 'anwser'? (the row has: question, anwser)" in message
    assert "row 2, field 'question': is None" in message


def test_an_empty_file_and_an_unknown_kind_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty.jsonl holds no rows" in message_of(tmp_path / "empty.jsonl")
    (tmp_path / "rows.txt").write_text("question,answer\n")
    message = message_of(tmp_path / "rows.txt", error=UnsupportedError)
    assert "rows.txt is not a .jsonl, .parquet, .csv file" in message


def test_bad_rows_stop_build_task(tmp_path):
    write(tmp_path, [GOOD, {"question": "q"}])
    with pytest.raises(DataError, match="1 of 2 rows is bad"):
        make(tmp_path, name="gsm8k", path="rows.jsonl")
