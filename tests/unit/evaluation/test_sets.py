# SPDX-License-Identifier: Apache-2.0
"""Test evaluation sets: their prompts, their ids, the answers of the tasks, and what is refused by name."""

import json

import pytest
from transformers import AutoTokenizer

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.checkpoint_engine.folder_source import FolderSource
from megarl.config import EvalTaskConfig, TaskConfig, override_config
from megarl.errors import AdapterError, ConfigError, DataError
from megarl.evaluation.sets import build_sets, with_absolute_files
from megarl.tasks import TaskContext, build_task
from megarl.types import Prompt
from tests.unit.tasks.support import make


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def build(tokenizer, folder, tasks, *overrides):
    task = {"name": "arithmetic", "held_out": 3, "options": {"size": 20}, "system_prompt": "Sum."}
    tree = {"model": {"path": "model"}, "task": task, "sampler": {"max_prompt_tokens": 80}}
    config = override_config(tree, [f"eval.tasks={tasks}", *overrides])
    return build_sets(config, folder, tokenizer, lambda: build_task(TaskContext(config.task, folder, 0)))


def test_a_set_has_the_first_prompts_of_its_task_and_held_out_the_last_of_the_runs(tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"Q{i}", "a": "x"}) + "\n" for i in range(9)))
    rows, held_out = build(tokenizer, tmp_path, "[{name: jsonl, path: rows.jsonl, options: {answer: a}, limit: 4}]")
    assert [prompt.id for prompt in rows.prompts] == [f"rows-{i}" for i in (1, 2, 3, 4)]
    assert tokenizer.decode(rows.ids[1]) == "<|system|>Sum.<|end|><|user|>Q1<|end|><|assistant|>"
    assert [prompt.id for prompt in held_out.prompts] == [f"arithmetic-{i}" for i in (17, 18, 19)]
    assert rows.context is not None and held_out.context is None


def test_prompts_that_are_too_long_are_named_or_left_out_and_counted(tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "Q" * n, "a": "x"}) + "\n" for n in (1, 200, 2)))
    tasks = "[{name: jsonl, path: rows.jsonl, options: {answer: a}}]"
    with pytest.raises(DataError, match=r"evaluation 'jsonl': 1 of 3 prompts are bad\n.*'rows-2' has 2\d\d tokens"):
        build(tokenizer, tmp_path, tasks)
    kept, _ = build(tokenizer, tmp_path, tasks, "task.long_prompts=drop")
    assert ([prompt.id for prompt in kept.prompts], kept.dropped) == (["rows-1", "rows-3"], 1)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Q" * 200, "a": "x"}) + "\n")
    with pytest.raises(DataError, match="all 1 prompts are longer"):
        build(tokenizer, tmp_path, tasks, "task.long_prompts=drop")


@pytest.mark.parametrize(
    ("tasks", "error", "message"),
    [
        ("[{name: jsonl, path: none.jsonl, options: {answer: a}}]", ConfigError, "evaluation 'jsonl': task.path"),
        ("[{name: jsonl, path: empty.jsonl, options: {answer: a}}]", DataError, "evaluation 'jsonl': .*no rows"),
        ("[{name: 'nobody.py:Nobody'}]", ConfigError, "evaluation 'Nobody': task .*nobody.py:Nobody' has no prompts"),
        ("[{name: arithmetic, options: {mini: 3}}]", ConfigError, "evaluation 'arithmetic': unknown key"),
        ("[{name: arithmetic, label: x, reward: 'no.py:f'}]", ConfigError, "evaluation 'x': .*no.py"),
        ("[{name: arithmetic, chat_template_kwargs: {thinking: true}}]", ConfigError, "has no variable 'thinking'"),
    ],
)
def test_a_set_that_cannot_be_built_is_named(tokenizer, tmp_path, tasks, error, message):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "nobody.py").write_text("class Nobody(list):\n    def __init__(self, context): pass\n")
    with pytest.raises(error, match=message):
        build(tokenizer, tmp_path, tasks)


def test_tasks_give_the_answer_that_maj_votes_by():
    def answers(task, data, *responses):
        return [task.reward(Prompt("p", (), data), response).answer for response in responses]

    sums = make(name="arithmetic")
    assert answers(sums, {"answer": 7}, "7", "3 + 4 = 7.", "is it 8?", "no") == ["7", "7", "8", ""]
    puzzle = make(name="countdown")
    right = {"numbers": [1, 2, 3], "target": 6}
    solved, other, wrong, none = answers(
        puzzle, right, "<answer>1 + 2 + 3</answer>", "<answer>3*2*1</answer>", "<answer>6</answer>", "six"
    )
    assert solved == other and wrong not in (solved, "") and none == ""


def test_numbers_written_in_several_ways_are_one_answer(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "How many?", "answer": "So #### 1,200"}) + "\n")
    task = make(tmp_path, name="gsm8k", path="rows.jsonl")
    responses = ("\\boxed{1200}", "\\boxed{1,200.0}", "about 1200", "\\boxed{7}", "none")
    answers = [task.reward(task[0], response).answer for response in responses]
    assert answers[0] == answers[1] == answers[2] and answers[3:] == ["7", ""]


def test_an_adapter_folder_that_lacks_its_weights_is_named(tmp_path):
    with pytest.raises(AdapterError, match=r"adapter_config\.json does not exist"):
        FolderSource().read(tmp_path, 0)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors does not exist; save the adapter as"):
        FolderSource().read(tmp_path, 0)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\1" * 40)
    with pytest.raises(AdapterError, match="is truncated or damaged"):
        FolderSource().read(tmp_path, 0)


def test_the_files_of_a_set_are_made_absolute_and_a_missing_one_is_named(tmp_path):
    (tmp_path / "own.py").write_text("def score(prompt, response):\n    return 1.0\n")
    run = TaskConfig(name="arithmetic", path="run.jsonl")
    one = EvalTaskConfig(name="jsonl", path=str(tmp_path), reward="own.py:score", label="mine")
    absolute = with_absolute_files(one, run, tmp_path, 0)
    assert (absolute.reward, absolute.key) == (f"{tmp_path / 'own.py'}:score", "mine")
    with pytest.raises(ConfigError, match=r"evaluation 'mine': .*gone.py"):
        with_absolute_files(one.model_copy(update={"reward": "gone.py:score"}), run, tmp_path, 0)
