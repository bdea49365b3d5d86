# SPDX-License-Identifier: Apache-2.0
"""Compare encode_prompt with the tokenizer's own rendering; name bad prompts before anything starts."""

import numpy as np
import pytest
import rich
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.config import TaskConfig
from megarl.errors import ConfigError, DataError, ModelError
from megarl.tasks.prompting import ShortPrompts, check_prompts, encode_prompt
from megarl.types import Prompt
from tests.unit.tasks.support import make

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}" + CHATML


def tokenizer_with(template):
    """Return a byte-level tokenizer with ChatML's special tokens, made by Hugging Face's own libraries."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_with(CHATML)


def prompt_of(*messages):
    return Prompt("row-3", tuple({"role": role, "content": content} for role, content in messages))


CHAT = prompt_of(("user", "2 + 2?"), ("assistant", "4"), ("user", "日本 <b>?"))


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_the_ids_are_those_of_the_rendered_template(tokenizer, system):
    ids = encode_prompt(tokenizer, CHAT, system, 1000)
    chat = [{"role": "system", "content": system}] if system else []
    text = tokenizer.apply_chat_template([*chat, *CHAT.messages], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    assert (system is not None) == (f"<|im_start|>system\n{system}<|im_end|>" in text)
    assert ids.dtype == np.int64
    assert ids.ndim == 1
    assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_limit_is_exact(tokenizer):
    count = len(encode_prompt(tokenizer, CHAT, None, 1000))
    assert len(encode_prompt(tokenizer, CHAT, None, count)) == count
    with pytest.raises(DataError) as caught:
        encode_prompt(tokenizer, CHAT, None, count - 1)
    assert f"prompt 'row-3' has {count} tokens, more than sampler.max_prompt_tokens ({count - 1})" in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "system", "part"),
    [
        (prompt_of(), None, "prompt 'row-3' is empty: it has no messages"),
        (prompt_of(("user", "")), None, "prompt 'row-3', message 1: 'content' is ''"),
        (prompt_of(("user", "a"), ("assistant", " \n")), None, "message 2: 'content' is ' \\n'"),
        (prompt_of(("user", None)), None, "'content' is None; it must be a non-empty string"),
        (prompt_of(("", "a")), None, "'role' is ''"),
        (Prompt("row-3", ({"content": "a"},)), None, "'role' is None"),
        (prompt_of(("system", "a"), ("user", "b")), "c", "task.system_prompt is set too"),
    ],
)
def test_a_malformed_prompt_is_named(tokenizer, prompt, system, part):
    with pytest.raises(DataError) as caught:
        encode_prompt(tokenizer, prompt, system, 1000)
    assert part in str(caught.value)


def test_a_template_that_refuses_the_chat_is_quoted():
    with pytest.raises(DataError, match="prompt 'row-3': the model's chat template refuses it: no system role here"):
        encode_prompt(tokenizer_with(NO_SYSTEM), CHAT, "Be brief.", 1000)


def test_a_template_that_renders_nothing_is_refused():
    with pytest.raises(DataError, match="renders to no tokens"):
        encode_prompt(tokenizer_with("{{ '' }}"), CHAT, None, 1000)


def test_a_tokenizer_without_a_chat_template_is_an_error_with_the_fix():
    with pytest.raises(ModelError, match=r"no chat template; .*chat_template\.jinja"):
        encode_prompt(tokenizer_with(None), CHAT, None, 1000)


def rows(folder, lengths):
    file = folder / "rows.jsonl"
    file.write_text("".join(f'{{"question": "{"x" * n}", "answer": "#### 1"}}\n' for n in lengths))
    return {"name": "gsm8k", "path": "rows.jsonl", "options": {"instruction": ""}}


def test_every_row_of_a_file_is_checked_and_every_bad_one_counted(tokenizer, tmp_path):
    config = rows(tmp_path, [10, 500, 20, 600, 30, 40, 700, 701, 702, 703])
    task = make(tmp_path, **config)
    with pytest.raises(DataError) as caught:
        check_prompts(task, tokenizer, TaskConfig(**config), 100)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rows.jsonl: 6 of 10 prompts are bad"
    assert [line.split("'")[1] for line in lines[1:6]] == ["rows-2", "rows-4", "rows-7", "rows-8", "rows-9"]
    assert lines[6:] == ["  and 1 more"]


def test_the_longest_prompt_is_reported(tokenizer, tmp_path):
    config = rows(tmp_path, [10, 30, 20])
    task = make(tmp_path, **config)
    assert check_prompts(task, tokenizer, TaskConfig(**config), 1000).longest == len(
        encode_prompt(tokenizer, task[1], None, 1000)
    )


def test_long_prompts_are_dropped_by_index_and_the_others_keep_their_order(tokenizer, tmp_path):
    config = rows(tmp_path, [10, 500, 20, 600, 30]) | {"long_prompts": "drop"}
    task = make(tmp_path, **config)
    lengths = check_prompts(task, tokenizer, TaskConfig(**config), 100)
    assert lengths == (len(encode_prompt(tokenizer, task[4], None, 1000)), [1, 3])
    short = ShortPrompts(task, lengths.dropped)
    assert [short[index] for index in range(len(short))] == [task[0], task[2], task[4]]
    assert short.dropped == 2
    assert short.reward(short[1], "1") == task.reward(task[2], "1")
    with pytest.raises(IndexError):
        short[3]
    with pytest.raises(DataError, match=r"rows\.jsonl: task\.long_prompts is 'drop', but all 5 prompts are longer"):
        check_prompts(task, tokenizer, TaskConfig(**config), 5)


def test_of_generated_prompts_every_one_is_looked_at_if_long_ones_are_dropped(tokenizer):
    config = {"name": "arithmetic", "options": {"size": 1000, "max": 100_000}, "long_prompts": "drop"}
    task = make(**config)
    counts = [len(encode_prompt(tokenizer, task[index], None, 1000)) for index in range(1000)]
    limit = max(counts) - 1
    expected = [index for index, count in enumerate(counts) if count > limit]
    assert check_prompts(task, tokenizer, TaskConfig(**config), limit) == (limit, expected)
    assert expected


@pytest.mark.parametrize("terminal", [True, False])
def test_the_last_row_of_a_long_file_is_checked_with_progress_on_a_terminal(tokenizer, tmp_path, capsys, terminal):
    rich.reconfigure(force_terminal=terminal)
    config = rows(tmp_path, [1] * 2_500 + [500])
    with pytest.raises(DataError, match="1 of 2501 prompts are bad\n  prompt 'rows-2501'"):
        check_prompts(make(tmp_path, **config), tokenizer, TaskConfig(**config), 100)
    assert ("Checking prompts" in capsys.readouterr().out) == terminal
    rich.reconfigure()


def test_generated_prompts_are_checked_by_a_bounded_sample(tokenizer):
    config = TaskConfig(name="arithmetic", options={"size": 10**7})
    assert 0 < check_prompts(make(name="arithmetic", options={"size": 10**7}), tokenizer, config, 1000).longest < 1000


def test_template_variables_change_the_prompt_and_those_it_lacks_are_refused():
    thinking = "{% if not enable_thinking | default(true) %}<no>{% endif %}" + CHATML
    tokenizer = tokenizer_with(thinking)
    config = TaskConfig(name="arithmetic", options={"size": 3}, chat_template_kwargs={"enable_thinking": False})
    task = make(name="arithmetic", options={"size": 3})
    plain = encode_prompt(tokenizer, task[0], None, 1000)
    ids = encode_prompt(tokenizer, task[0], None, 1000, config.chat_template_kwargs)
    assert tokenizer.decode(ids) == "< n o > " + tokenizer.decode(plain)
    bare = check_prompts(task, tokenizer, TaskConfig(name="arithmetic"), 1000).longest
    assert check_prompts(task, tokenizer, config, 1000).longest == bare + len(ids) - len(plain) > bare
    for wrong, part in (
        ({"enable_thinkin": False}, "has no variable 'enable_thinkin'; did you mean 'enable_thinking'?"),
        ({"tokenize": False}, r"chat_template_kwargs\.tokenize is set, which megarl sets itself"),
    ):
        with pytest.raises(ConfigError, match=part):
            check_prompts(task, tokenizer, TaskConfig(name="arithmetic", chat_template_kwargs=wrong), 1000)
