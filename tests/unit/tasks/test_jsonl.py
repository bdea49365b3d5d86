# SPDX-License-Identifier: Apache-2.0
"""Rows of the user's own as a task: every kind of source gives the same prompts; what is wrong is named."""

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from megarl.config import parse_config
from megarl.errors import ConfigError, DataError
from megarl.launch.names import with_absolute_paths
from tests.unit.tasks.support import make

ROWS = [{"question": "1 + 1?", "answer": "2", "level": "easy"}, {"question": "3, or 4?", "answer": "4", "level": ""}]
OPTIONS = {"prompt": "question", "answer": "answer"}


def write_source(folder, kind):
    """The value of ``task.path`` for ``ROWS`` in one of the forms."""
    if kind == "jsonl":
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    elif kind == "csv":
        (folder / "rows.csv").write_text('question,answer,level\n1 + 1?,2,easy\n"3, or 4?",4,\n')
    elif kind == "folder":
        datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "rows"))
        return "rows"
    else:
        splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
        splits.save_to_disk(str(folder / "rows"))
        return "rows"
    return f"rows.{kind}"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "folder", "splits"])
def test_every_kind_of_source_gives_the_same_prompts(tmp_path, kind):
    path = write_source(tmp_path, kind)
    task = make(tmp_path, name="jsonl", path=path, options=OPTIONS)
    assert [task[i].id for i in range(len(task))] == ["rows-1", "rows-2"]
    assert task[1].messages == ({"role": "user", "content": "3, or 4?"},)
    assert task[1].data == {"answer": "4", "level": ""}
    assert [task.reward(task[1], text).score for text in (" 4\n", "4.", "")] == [1.0, 0.0, 0.0]
    tree = {"model": {"path": "m"}, "task": {"name": "jsonl", "path": path}}
    assert with_absolute_paths(parse_config(tree), tmp_path).task.path == str(tmp_path / path)


def test_a_column_of_messages_is_the_chat(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "Ann"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": chat, "n": 3}]), tmp_path / "rows.parquet")
    task = make(tmp_path, name="jsonl", path="rows.parquet", options={"answer": "n"})
    assert task[0].messages == tuple(chat)
    assert task.reward(task[0], "3").score == 1.0


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"answer": "2", "qestion": "x"}, "row 1, field 'question': is missing; did you mean 'qestion'? (the row has"),
        ({"question": 3, "answer": "2"}, "row 1, field 'question': is 3; it must be a string or a list of messages"),
        ({"question": " ", "answer": "2"}, "field 'question': is ' '; it is empty"),
        ({"question": [], "answer": "2"}, "field 'question': is []; it is empty"),
        ({"question": [{"role": "user"}], "answer": "2"}, "'content' of message 1 must be a non-empty string"),
        ({"question": ["hi"], "answer": "2"}, "message 1 must be an object with role and content"),
        (
            {"question": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "2"},
            "the last message is the assistant's; leave it out",
        ),
        ({"question": "q", "answer": None}, "field 'answer': is None; it must be a non-empty string or an integer"),
    ],
)
def test_a_bad_row_is_named_by_file_row_column_and_value(tmp_path, row, part):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError) as caught:
        make(tmp_path, name="jsonl", path="rows.jsonl", options=OPTIONS)
    assert str(caught.value).startswith(f"{tmp_path / 'rows.jsonl'}: 1 of 1 rows is bad\n")
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("question,answer\na,2,3\n", "row 1: has 3 cells; the first line names 2 columns"),
        ("question,question\na,b\n", "names column 'question' twice"),
        ('question,answer\n"a,2\n', "is not a readable CSV file"),
        ("question,answer\n", "holds no rows"),
        ("", "holds no rows"),
    ],
)
def test_a_broken_csv_is_named(tmp_path, text, part):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        make(tmp_path, name="jsonl", path="rows.csv", options=OPTIONS)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"options": {"prompt": "question"}}, "has no reward of its own: set task.reward to file.py:function, or task"),
        ({"options": OPTIONS | {"promt": "x"}}, "unknown key 'task.options.promt'; did you mean 'prompt'?"),
        ({"options": {"prompt": "answer", "answer": "answer"}}, "which is the prompt's column too"),
        ({"path": None}, "task.path is required"),
        ({"path": "none.jsonl"}, "there is no file"),
        ({"path": "rows", "options": OPTIONS | {"split": "tran"}}, "no such split; did you mean 'train'?"),
        ({"path": "."}, "which cannot be loaded; save it there with datasets.save_to_disk"),
        ({"path": "someone/nothing"}, "check the id, the network and access to it"),
    ],
)
def test_wrong_settings_are_named(tmp_path, monkeypatch, changes, part):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_source(tmp_path, "splits")
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, **{"name": "jsonl", "path": "rows", "options": OPTIONS} | changes)
    assert part in str(caught.value)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_countdown_takes_rows(tmp_path, kind):
    rows = [{"numbers": [1, 2, 3], "target": 6, "other": "x"}, {"numbers": [5, 7], "target": 35, "other": "y"}]
    if kind == "jsonl":
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        (tmp_path / "p.csv").write_text('numbers,target,other\n"[1, 2, 3]",6,x\n"[5, 7]",35,y\n')
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    task = make(tmp_path, name="countdown", path=f"p.{kind}", options={"format_score": 0.2})
    assert (len(task), task[1].id, task[1].data) == (2, "p-2", {"numbers": [5, 7], "target": 35})
    assert [task.reward(task[1], f"<answer>{x}</answer>").score for x in ("5 * 7", "5 + 7")] == [1.0, 0.2]
    with pytest.raises(ConfigError, match=r"task\.options\.size is 3, but the puzzles are the rows"):
        make(tmp_path, name="countdown", path=f"p.{kind}", options={"size": 3})


def test_a_bad_puzzle_is_named(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"numbers": [1, "2"], "target": 6}\n{"numbers": [1], "target": 6}\n')
    with pytest.raises(DataError, match=r"2 of 2 rows are bad\n  row 1, field 'numbers.1': is '2'"):
        make(tmp_path, name="countdown", path="p.jsonl")
