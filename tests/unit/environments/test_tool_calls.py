# SPDX-License-Identifier: Apache-2.0
"""Test that calls of tools are read in the form in which real chat templates write them, and others are refused."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.environments.chat import following
from megarl.environments.tool_calls import Call, CallFormat, call_format, marked_text
from megarl.errors import ConfigError

# TRL keeps copies of the templates that models are published with.
TEMPLATES = Path(find_spec("trl").origin).parent / "chat_templates"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
USER = {"role": "user", "content": "hi"}
CALLS = [Call("add", {"a": [1, {"b": "}"}], "c": "x"}), Call("add", {})]
HERMES = CallFormat("<tool_call>", "</tool_call>", "name", "arguments")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return AutoTokenizer.from_pretrained(path)


def template(name):
    return {"chat_template": (TEMPLATES / f"{name}.jinja").read_text()}


def written(tokenizer, name, content, calls):
    """Return what the template makes of an assistant's message with calls, without what ends it."""
    told = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    head = tokenizer.apply_chat_template(
        [USER], tokenize=False, tools=TOOLS, add_generation_prompt=True, **template(name)
    )
    message = {"role": "assistant", "content": content, "tool_calls": told}
    whole = tokenizer.apply_chat_template([USER, message], tokenize=False, tools=TOOLS, **template(name))
    assert whole.startswith(head)
    return whole[len(head) :].removesuffix("\n").removesuffix("<|im_end|>").removesuffix("<|eot_id|>")


@pytest.mark.parametrize(("name", "count"), [("qwen2_5", 2), ("qwen3_instruct_2507", 2), ("llama3_1", 1)])
def test_what_a_template_writes_is_read_back(tokenizer, name, count):
    form = call_format(tokenizer, template(name), TOOLS)
    assert form == (CallFormat("", "", "name", "parameters") if name == "llama3_1" else HERMES)
    text = written(tokenizer, name, "", CALLS[:count])
    assert form.read(text) == ("", CALLS[:count])
    assert form.read("No tool is needed.") == ("No tool is needed.", [])


def test_text_beside_calls_stays(tokenizer):
    text = written(tokenizer, "qwen3", "<think>\nwhy\n</think>\n\nI add.", CALLS)
    said, calls = HERMES.read(text)
    assert said.endswith("I add.") and "tool_call" not in said and calls == CALLS


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}} and more',
        "<tool_call>",
    ],
)
def test_what_is_no_well_formed_call_stays_text(text):
    assert HERMES.read(text) == (text, [])


def test_arguments_may_be_text_lists_hold_several_calls_and_the_policys_ids_are_kept():
    form = CallFormat("[TOOL_CALLS]", "", "name", "arguments")
    text = 'So [TOOL_CALLS] [{"name": "f", "arguments": "{\\"a\\": 1}", "id": "abc"}, {"name": "g"}]'
    assert form.read(text) == ("So", [Call("f", {"a": 1}, "abc"), Call("g", {})])


def test_special_tokens_are_dropped_but_for_marks(tokenizer):
    ids = tokenizer.encode("<|user|>a<|end|>", add_special_tokens=False)
    assert marked_text(ids, tokenizer, CallFormat("<|user|>", "", "name", "arguments")) == "<|user|>a"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma3", "does not show tools to the model"),
        ("qwen3_6", "writes a call of a tool as '<tool_call>.*<function=megarl_probe>.*only JSON objects"),
    ],
)
def test_other_templates_are_refused_by_name(tokenizer, name, message):
    with pytest.raises(ConfigError, match=f"(?s)the chat template of '.*{message}"):
        call_format(tokenizer, template(name), TOOLS)


def test_what_a_tool_says_is_appended_by_real_templates(tokenizer):
    said = {"role": "tool", "content": "3", "tool_call_id": "call00000"}
    text = following(tokenizer, {**template("qwen3"), "tools": TOOLS}, [said, said])
    response = "<tool_response>\n3\n</tool_response>"
    assert text == f"<|im_end|>\n<|im_start|>user\n{response}\n{response}<|im_end|>\n<|im_start|>assistant\n"
