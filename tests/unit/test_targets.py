# SPDX-License-Identifier: Apache-2.0
"""Test the arguments of `megarl eval`, `sample` and `serve`: what is found, what is refused, and a conversation."""

import io
import itertools
import json
from contextlib import nullcontext

import numpy as np
import pytest

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.cli import target as targets
from megarl.cli.evaluate import _find
from megarl.cli.main import main
from megarl.cli.serve import has_key, is_local
from megarl.cli.target import find_target
from megarl.config import dump_config, parse_config
from megarl.sampler.openai_server import server_arguments
from megarl.types import Completion
from tests.helpers.models import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model, a run with an adapter and one without."""
    folder = tmp_path_factory.mktemp("targets")
    model = make_model(folder / "model", "qwen3", tied=True, vocab_size=100, eos_token_id=0, head_dim=32)
    make_tokenizer(model)
    tree = {"model": {"path": str(model), "dtype": "float32"}, "task": {"name": "arithmetic", "system_prompt": "Sum."}}
    config = parse_config(tree | {"sampler": {"max_prompt_tokens": 96, "max_response_tokens": 8}})
    for name in ("run", "empty"):
        (folder / name).mkdir()
        (folder / name / "config.yaml").write_text(dump_config(config))
    adapter = folder / "run" / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 24, "base_model_name_or_path": str(model)}))
    return folder


def test_a_target_is_a_run_an_adapter_or_a_model(folder):
    run, adapter, model = (find_target(str(folder / name)) for name in ("run", "run/adapter", "model"))
    assert run.adapter == adapter.adapter == str(folder / "run" / "adapter")
    assert (run.run, adapter.run, model.run, model.adapter) == (folder / "run", None, None, None)
    assert {one.config.model.path for one in (run, adapter, model)} == {str(folder / "model")}
    assert model.config.model.dtype == "bfloat16" and model.like(run.config.model).config.model.dtype == "float32"
    assert find_target(str(folder / "run"), ["sampler.seed=3"]).config.sampler.seed == 3


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        (["eval", "empty"], 1, "empty' holds no adapter yet"),
        (["eval", "run@7"], 1, "run' has no checkpoint of step 7; it has complete ones of steps: none"),
        (["sample", "nothing", "Hi"], 2, "which is neither a run folder"),
        (["eval", "nothing@3"], 2, "nothing' is not a run folder"),
        (["eval", "run"], 2, "no run named has eval.tasks or task.held_out; give --task"),
        (["eval", "model", "--task", "{name: arithmetic, metrics: [pass@9]}"], 2, "pass@9, but each prompt has 8"),
        (["eval", "model", "--task", "arithmetik"], 2, "evaluation 'arithmetik': unknown task 'arithmetik'; did you"),
        (["eval", "model", "--task", "{name: jsonl, path: rows.jsonl, options: {answer: a}}"], 1, "rows.jsonl"),
        (["eval", "model", "--task", "arithmetic", "--json", "no/file"], 2, "--json is 'no/file'"),
        (["sample", "run", "Hi", "--samples", "2", "--temperature", "0"], 2, "which would all be the same"),
        (["sample", "run", "Hi", "--temperature", "-1"], 2, "'temperature' is -1.0"),
        (["sample", "run", "Hi", "--max-tokens", "4000"], 2, "--max-tokens is 4000, but the model has 256 positions"),
        (["serve", "run", "--host", "0.0.0.0"], 2, "anybody who reaches it could use the server; set VLLM_API_KEY"),
        (["serve", "run", "--vllm", "'"], 2, "which a shell could not split"),
        (["serve", "run", "--host", "0.0.0.0", "--vllm=--api-key="], 2, "anybody who reaches it could use the"),
        (["serve", "run", "--vllm=--host 0.0.0.0"], 2, "--vllm holds --host; give it to `megarl serve` itself"),
    ],
)
def test_a_wrong_argument_is_one_message(folder, command, status, message, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    (folder / "rows.jsonl").write_text("")
    assert main(command) == status
    assert message in capsys.readouterr().err


class Engine:
    """Answers each prompt with its last question's tokens, reversed."""

    def __init__(self) -> None:
        self.prompts, self.sampling = [], None

    def load(self, target, version):
        self.adapter = target.adapter

    def generate(self, prompts, version, seeds, sampling):
        self.prompts += prompts
        self.sampling = sampling
        drawn = np.array([ord("a") - 27, ord("b") - 27, 0])
        done = Completion(prompts[0], drawn, np.zeros(3, np.float32), np.zeros(3, np.int64), "stop")
        return [[done] * sampling.samples]


@pytest.fixture
def engine(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(targets, "TargetEngine", lambda chosen, config, log: nullcontext(engine))
    return engine


def decoded(folder, ids):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "model").decode(ids)


def test_only_keys_that_vllm_asks_for_count():
    for options in (["--api-key", "k"], ["--api-key=k"], ["--api_key", "k"], ["--x", "--api-key", "a", "b"]):
        assert has_key(options, {}), options
    for options in ([], ["--api-key"], ["--api-key", "--x"], ["--api-key="], ["--api-key", ""], ["--api-keys", "k"]):
        assert not has_key(options, {}), options
    assert has_key([], {"VLLM_API_KEY": "k"}) and not has_key([], {"VLLM_API_KEY": ""})


def test_settings_and_tasks_are_those_of_the_first_run_whatever_stands_before_it(folder):
    texts = [str(folder / "model"), str(folder / "run")]
    found, config = _find(texts, ["task.held_out=4", "sampler.seed=3"], ["eval.tasks=[{name: held_out}]"])
    assert [target.label for target in found] == texts and config is found[1].config
    assert (config.task.held_out, config.sampler.seed, config.eval.tasks[0].name) == (4, 3, "held_out")
    assert found[0].config.sampler.seed != 3
    found, config = _find(texts[:1], ["sampler.seed=3"], [])
    assert config is found[0].config and config.sampler.seed == 3


def test_prompts_are_rendered_by_the_chat_template_and_raw_ones_are_not(folder, engine, capsys):
    assert main(["sample", str(folder / "run"), "Hi", "Ho", "--samples", "2", "--top-p", "0.5"]) == 0
    assert capsys.readouterr().out == "ab\n---\nab\n" * 2
    assert (engine.adapter, engine.sampling.samples, engine.sampling.top_p) == (str(folder / "run/adapter"), 2, 0.5)
    asked = [decoded(folder, ids) for ids in engine.prompts]
    assert asked == [f"<|system|>Sum.<|end|><|user|>{text}<|end|><|assistant|>" for text in ("Hi", "Ho")]
    assert main(["sample", str(folder / "run"), "Hi", "--raw"]) == 0
    assert decoded(folder, engine.prompts[-1]) == "Hi"


def test_lines_of_standard_input_are_one_conversation(folder, engine, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nHo\n"))
    assert main(["sample", str(folder / "run")]) == 0
    said = "<|system|>Sum.<|end|><|user|>Hi<|end|><|assistant|>ab<|end|><|user|>Ho<|end|><|assistant|>"
    assert decoded(folder, engine.prompts[-1]) == said
    assert len(engine.prompts) == 2


def test_the_server_has_the_adapter_with_enough_rank_and_listens_on_this_host(folder):
    run, model = find_target(str(folder / "run")), find_target(str(folder / "model"))
    options = server_arguments(run.config.engine, "cpu", "mine")
    pairs = dict(itertools.pairwise(options))
    assert pairs["--lora-modules"] == f"mine={folder / 'run' / 'adapter'}"
    assert (pairs["--max-lora-rank"], pairs["--dtype"], pairs["--max-model-len"]) == ("32", "float32", "256")
    assert "--enable-lora" not in server_arguments(model.config.engine, "cuda", "mine")
    assert all(map(is_local, ("127.0.0.1", "localhost", "::1"))) and not any(map(is_local, ("0.0.0.0", "node7")))
