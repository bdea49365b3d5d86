# SPDX-License-Identifier: Apache-2.0
"""Check that each mistake in a recipe is one clear error, and that correct recipes survive saving and loading."""

import json
import subprocess
import sys

import pytest

from megarl.config import check_run, dump_config, load_config, parse_config
from megarl.errors import ConfigError, UnsupportedError
from tests.unit.config.recipes import SHAPE, message_of

WRONG = {
    "a typo in a section": ("trian.steps=3", ["unknown key 'trian'", "did you mean 'train'?", "known: model, task"]),
    "a typo in a key": ("train.stesp=3", ["unknown key 'train.stesp'", "did you mean 'steps'?", "learning_rate"]),
    "a key of another section": ("model.steps=3", ["unknown key 'model.steps'", "known: path, family, dtype, backend"]),
    "a wrong type": ("train.steps=many", ["'train.steps' is 'many'", "valid integer"]),
    "a float for an int": ("train.steps=3.0", ["'train.steps' is 3.0", "valid integer"]),
    "a number in quotes": ("train.steps='3'", ["'train.steps' is '3'", "valid integer"]),
    "a bool for an int": ("train.steps=true", ["'train.steps' is True"]),
    "a wrong choice": ("model.dtype=bfloat61", ["'bfloat61'", "'bfloat16' or 'float32'", "did you mean 'bfloat16'?"]),
    "a wrong item of a list": ("lora.target_modules=[q_proj,3]", ["'lora.target_modules.1' is 3", "string"]),
    "a wrong union": ("lora.target_modules=3", ["'lora.target_modules' is 3", "'all-linear'", "valid list"]),
    "a wrong value of a mapping": ("lora.rank_pattern={q_proj: x}", ["'lora.rank_pattern.q_proj' is 'x'"]),
    "out of range": ("sampler.samples_per_prompt=1", ["'sampler.samples_per_prompt' is 1", "equal to 2"]),
    "a learning rate of nobody's": (
        "train.learning_rate=1000",
        ["'train.learning_rate' is 1000", "less than or equal to 1"],
    ),
    "infinity": ("train.learning_rate=.inf", ["'train.learning_rate' is inf", "finite"]),
    "a scalar for a section": ("model=3", ["'model' is 3", "mapping"]),
    "no value": ("train.steps=", ["override 'train.steps='", "no value"]),
    "no equals sign": ("train", ["override 'train'", "section.key=value"]),
    "no key": ("=3", ["override '=3'", "section.key=value"]),
    "an empty part of a key": ("train..steps=3", ["override 'train..steps=3'", "section.key=value"]),
    "half a list": ("lora.target_modules=[q", ["override 'lora.target_modules=[q'", "cannot be applied"]),
    "an unset variable": ("model.path=${oc.env:MEGARL_UNSET}", ["'model.path'", "MEGARL_UNSET"]),
    "a folder that is missing": ("model.path=/nowhere", ["model.path is '/nowhere'", "not a folder"]),
    "9 heads at TP2": ("parallel.tensor=2", ["parallel.tensor (2)", "num_attention_heads (9)", "allowed: 1, 3, 9"]),
    "an MLP of 1536 at TP9": ("parallel.tensor=9", ["parallel.tensor (9)", "intermediate_size (1536)"]),
    "30 layers at PP31": (
        "parallel.pipeline=31",
        ["parallel.pipeline (31)", "num_hidden_layers (30)", "needs a layer"],
    ),
    "9 heads at sampler TP2": ("sampler.parallel.tensor=2", ["sampler.parallel.tensor (2)", "num_attention_heads (9)"]),
    "an MLP of 1536 at sampler TP9": (
        "sampler.parallel.tensor=9",
        ["sampler.parallel.tensor (9)", "intermediate_size (1536)"],
    ),
    "an engine of two stages": ("sampler.parallel.pipeline=2", ["'sampler.parallel.pipeline' is 2"]),
    "VPP without PP": ("parallel.virtual_pipeline=2", ["parallel.virtual_pipeline (2)", "parallel.pipeline > 1"]),
    "experts without experts": ("parallel.expert=2", ["parallel.expert is 2", "no experts"]),
    "SP without TP": ("parallel.sequence=true", ["parallel.sequence", "parallel.tensor > 1"]),
    "too small a token budget": ("train.micro_batch_tokens=10", ["train.micro_batch_tokens (10)", "768"]),
    "no room for CP's padding": (
        "parallel.context=5000",
        ["train.micro_batch_tokens (8192)", "2 x parallel.context (10000)", "at least 10000"],
    ),
    "more ranks than samples": ("parallel.data=1000", ["parallel.data (1000)", "256 completions"]),
    "more updates than groups": ("train.updates_per_step=64", ["train.updates_per_step (64)", "(32)"]),
    "colder than vLLM samples": ("sampler.temperature=0.003", ["sampler.temperature", "0.003", "equal to 0.01"]),
    "no adapter to start from": ("lora.init_from=/nowhere", ["lora.init_from", "adapter_config.json"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_override_is_one_line_that_names_field_value_and_what_is_allowed(recipe, case):
    override, parts = WRONG[case]
    message = message_of(recipe, override)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


EXPERTS = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "num_experts": 8,
    "moe_intermediate_size": 36,
}


def test_trainers_copy_kv_heads_that_are_fewer_than_ranks(recipe, model):
    (model / "config.json").write_text(json.dumps({"num_attention_heads": 12, "num_key_value_heads": 3}))
    for tensor in (3, 6, 12):
        assert load_config(recipe, [f"parallel.tensor={tensor}", "sampler.parallel.tensor=1"]).parallel.tensor == tensor
    message = message_of(recipe, "parallel.tensor=4")
    assert "parallel.tensor (4) must divide the model's num_key_value_heads (3) or be a multiple of it" in message


@pytest.mark.parametrize(
    ("tensor", "changes", "parts"),
    [
        (4, {}, ["num_key_value_heads (3)", "or be a multiple of it"]),
        (3, {"moe_intermediate_size": 40}, ["moe_intermediate_size (40)", "allowed: 1, 2, 4"]),
        (12, {}, ["at most the model's num_experts (8)"]),
        (3, {"mlp_only_layers": [0], "intermediate_size": 40}, ["intermediate_size (40)"]),
    ],
)
def test_an_engine_whose_ranks_do_not_divide_the_experts_is_refused(recipe, model, tensor, changes, parts):
    (model / "config.json").write_text(json.dumps({**EXPERTS, **changes}))
    message = message_of(recipe, f"sampler.parallel.tensor={tensor}")
    assert [part for part in [f"sampler.parallel.tensor ({tensor})", *parts] if part not in message] == []


@pytest.mark.parametrize(("tensor", "changes"), [(3, {"intermediate_size": 40}), (6, {})])
def test_engines_split_experts_and_copy_kv_heads(recipe, model, tensor, changes):
    (model / "config.json").write_text(json.dumps({**EXPERTS, **changes}))
    assert load_config(recipe, [f"sampler.parallel.tensor={tensor}"]).sampler.parallel.tensor == tensor


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("sampler.top_p=0.9", ["sampler.top_p is 0.9", "only 1.0"]),
        ("sampler.top_k=50", ["sampler.top_k is 50", "only -1"]),
    ],
)
def test_what_is_valid_but_not_proven_is_refused_as_unsupported(recipe, override, parts):
    message = message_of(recipe, override, error=UnsupportedError)
    assert all(part in message for part in parts)


def test_every_wrong_field_has_a_line(recipe):
    message = message_of(recipe, "train.steps=0", "loss.clip_low=1.1", "trian.x=1")
    assert [line.split("'")[1] for line in message.splitlines()] == ["loss.clip_low", "train.steps", "trian"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "mapping of sections (model, task"),
        ("hello", "mapping of sections"),
        ("- 1\n- 2", "mapping of sections"),
        ("model: [", "not valid YAML"),
        ("model:\n\tpath: x", "not valid YAML"),
        ("model: {}\nmodel: {}", "duplicate key"),
        ("model: !!python/object:os.system {}", "not valid YAML"),
        ("model: {path: '${model.path}'}\ntask: {name: x}", "Recursive"),
        ("train: {steps: 3}", "'model' is required and missing\n'task' is required and missing"),
        ("model: null\ntask: {name: x}", "'model' is None"),
        ("model:\n  path: ???\ntask: {name: x}", "'model.path'"),
    ],
)
def test_a_malformed_recipe_is_a_config_error(tmp_path, text, part):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert part in message_of(file)


def test_a_recipe_that_is_missing_binary_or_a_folder_is_a_config_error(tmp_path):
    assert "does not exist" in message_of(tmp_path / "none.yaml")
    assert "is not a file" in message_of(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not valid YAML" in message_of(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{", "cannot be read as JSON"),
        (b"[1]", "no JSON object"),
        (b"\xff", "cannot be read as JSON"),
        (b'{"num_attention_heads": "9"}', "num_attention_heads = '9'; it must be an integer"),
        (b'{"hidden_size": ["x"]}', "hidden_size = ['x']; it must be an integer"),
        (b'{"kv_lora_rank": "8"}', "kv_lora_rank = '8'; it must be an integer"),
        (b'{"n_shared_experts": Infinity}', "n_shared_experts = inf; it must be an integer"),
        (b'{"decoder_sparse_step": ""}', "decoder_sparse_step = ''; it must be an integer"),
    ],
)
def test_a_malformed_model_config_is_a_config_error(recipe, model, content, part):
    (model / "config.json").write_bytes(content)
    assert part in message_of(recipe)


def test_an_empty_mapping_replaces_the_recipes_and_others_are_merged_into_it(recipe):
    given = ["lora.rank_pattern.q_proj=4", "task.options.max=9"]
    config = load_config(recipe, [*given, "lora.rank_pattern={}", "task.options={min: 2}"])
    assert config.lora.rank_pattern == {}
    assert (config.task.options["min"], config.task.options["max"]) == (2, 9)


def test_overrides_apply_in_order_and_keep_their_yaml_types(recipe):
    config = load_config(
        recipe,
        [
            "train.learning_rate=3e-4",
            "train.steps=5",
            "train.steps=7",
            "lora.target_modules=[q_proj, v_proj]",
            "lora.rank_pattern.q_proj=4",
            "loss.importance_cap=null",
            "task.system_prompt=a = b",
            "task.options.max=9",
            "parallel.tensor=3",
        ],
    )
    assert config.train.learning_rate == 3e-4
    assert config.train.steps == 7
    assert config.lora.target_modules == ["q_proj", "v_proj"]
    assert config.lora.rank_pattern == {"q_proj": 4}
    assert config.loss.importance_cap is None
    assert config.task.system_prompt == "a = b"
    assert config.task.options == {"max": 9}
    assert config.parallel.sequence_parallel


@pytest.mark.parametrize(
    "prompt",
    ["plain", "pay ${price} for $x", "line\nline: - '\"", "日本", "null", "1e-3", "0x1f", "yes", "1:30", " "],
)
def test_dump_then_load_gives_the_same_config(recipe, tmp_path, model, prompt):
    tree = {
        "model": {"path": str(model), "dtype": "float32"},
        "task": {"name": "arithmetic", "system_prompt": prompt, "options": {"a": [prompt, 1, None], "b": {"c": 1e-5}}},
        "lora": {"target_modules": ["q_proj"], "alpha_pattern": {"a.b": 3}},
        "loss": {"importance_cap": None},
        "train": {"learning_rate": 1e-5, "max_mismatch": 0.1},
    }
    config = parse_config(tree)
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_config(config), encoding="utf-8")
    assert load_config(saved) == config


def test_the_environment_is_read_and_saved_resolved(recipe, tmp_path, model, monkeypatch):
    recipe.write_text("model: {path: '${oc.env:MEGARL_TEST_MODEL}'}\ntask: {name: arithmetic}\n")
    monkeypatch.setenv("MEGARL_TEST_MODEL", str(model))
    config = load_config(recipe)
    monkeypatch.delenv("MEGARL_TEST_MODEL")
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_config(config))
    assert load_config(saved).model.path == str(model)


def test_a_config_cannot_be_changed(recipe):
    with pytest.raises(ValueError, match="frozen"):
        load_config(recipe).train.steps = 3


def test_importing_config_and_tasks_loads_nothing_heavy():
    code = (
        "import sys, megarl.config, megarl.tasks, megarl.tasks.prompting\n"
        "heavy = {'torch', 'vllm', 'ray', 'transformers', 'peft', 'megatron', 'pyarrow', 'math_verify', 'sympy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_transformer_engine_is_refused_where_it_is_not_proven(recipe, model):
    assert load_config(recipe, ["model.backend=te"]).model.backend == "te"
    assert "'local', 'te' or 'transformers'" in message_of(recipe, "model.backend=tee")
    (model / "config.json").write_text(json.dumps(SHAPE | {"kv_lora_rank": 20, "qk_rope_head_dim": 8}))
    assert "model.backend is 'te'" in message_of(recipe, "model.backend=te", error=UnsupportedError)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["parallel.pipeline=2"], "parallel.pipeline = 2"),
        (["parallel.context=2"], "parallel.context = 2"),
        (["lora.lora_dropout=0.1", "parallel.tensor=3"], "lora.lora_dropout = 0.1 and parallel.tensor = 3"),
        (["lora.lora_dropout=0.1", "train.recompute=full"], "lora.lora_dropout = 0.1 and train.recompute = 'full'"),
        (["train.overlap_grad_reduce=true"], "train.overlap_grad_reduce = true"),
    ],
    ids=str,
)
def test_what_cuda_graphs_cannot_hold_is_refused(recipe, overrides, named):
    for held in ("train.compile=true", "parallel.tensor=3", "train.recompute=full", "lora.lora_dropout=0.1"):
        assert load_config(recipe, ["train.cuda_graphs=true", held]).train.cuda_graphs
    assert named in message_of(recipe, "train.cuda_graphs=true", *overrides, error=UnsupportedError)


def test_a_config_whose_model_is_gone_can_still_be_read(recipe, model):
    (model / "config.json").unlink()
    config = load_config(recipe)
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        check_run(config)


def test_sequences_beyond_the_models_positions_are_refused(recipe, model):
    (model / "config.json").write_text(json.dumps(SHAPE | {"max_position_embeddings": 700}))
    message = message_of(recipe, "sampler.max_prompt_tokens=500")
    assert "500" in message and "= 756 exceeds the model's max_position_embeddings (700)" in message
