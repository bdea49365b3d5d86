# SPDX-License-Identifier: Apache-2.0
"""Check that vLLM's settings make it sample exactly the configured distribution."""

import ast
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from megarl.config import RunConfig, parse_config
from megarl.errors import ConfigError, UnsupportedError
from megarl.sampler.engine import adapters, settings


def config(folder: Path, **sections: dict) -> RunConfig:
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    return parse_config({"model": {"path": str(folder)}, "task": {"name": "arithmetic"}} | sections)


@pytest.mark.parametrize(
    ("generation", "model", "ids"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 2}, (5,)),
        ({"eos_token_id": [9, 5, 9]}, {}, (5, 9)),
        ({}, {"eos_token_id": 2}, (2,)),
        (None, {"eos_token_id": [2, 3]}, (2, 3)),
        (None, {}, ()),
    ],
)
def test_stop_tokens_come_from_generation_config_then_config(tmp_path: Path, generation, model, ids) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert settings.stop_tokens(str(tmp_path)) == ids


@pytest.mark.parametrize("value", ["</s>", [1, "a"], True, 1.5])
def test_a_stop_token_that_is_no_id_is_refused(tmp_path: Path, value) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match="eos_token_id"):
        settings.stop_tokens(str(tmp_path))


@pytest.mark.parametrize(("rank", "pattern", "buffer"), [(1, {}, 1), (2, {}, 8), (16, {}, 16), (8, {"q_proj": 33}, 64)])
def test_the_rank_buffer_is_the_smallest_that_fits(tmp_path: Path, rank: int, pattern: dict, buffer: int) -> None:
    assert adapters.max_lora_rank(config(tmp_path, lora={"r": rank, "rank_pattern": pattern})) == buffer


def test_a_rank_above_vllms_largest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="rank 600; vLLM supports at most 512"):
        adapters.max_lora_rank(config(tmp_path, lora={"r": 600}))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
def test_a_family_that_vllm_was_not_shown_to_sample_is_refused(tmp_path: Path, family: str) -> None:
    run = config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    settings.check_sampled(run)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UnsupportedError, match=f"'{family}'; supported are llama, "):
        settings.check_sampled(run)


@pytest.mark.parametrize(
    ("targets", "module"),
    [
        (["q_proj", "lm_head"], "lm_head"),
        (["embed_tokens"], "model.embed_tokens"),
        (r".*\.(q_proj|embed_tokens)", "model.embed_tokens"),
        (["q_proj", "down_proj"], None),
        (r".*\.q_proj", None),
        ("all-linear", None),
    ],
)
@pytest.mark.parametrize("saved", [False, True], ids=["in the config", "to start from"])
def test_an_adapter_that_vllm_would_hold_otherwise_is_refused(tmp_path: Path, targets, module, saved) -> None:
    lora = {"target_modules": targets}
    if saved:
        (tmp_path / "adapter_config.json").write_text(json.dumps(lora))
        lora = {"init_from": str(tmp_path)}
    run = config(tmp_path, lora=lora)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    if module is None:
        settings.check_sampled(run)
        return
    with pytest.raises(UnsupportedError, match=f"adapters of '{module}'"):
        settings.check_sampled(run)


def test_the_adapter_to_start_from_decides_the_rank(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"r": 40, "rank_pattern": None}))
    assert adapters.max_lora_rank(config(tmp_path, lora={"init_from": str(tmp_path / "adapter")})) == 64


@pytest.mark.parametrize(("base", "load_format"), [("send", "dummy"), ("disk", "auto")])
def test_a_base_that_is_sent_starts_from_dummy_weights(tmp_path: Path, base: str, load_format: str) -> None:
    arguments = settings.engine_arguments(config(tmp_path, checkpoint_engine={"base_weights": base}), 0, "cpu")
    assert arguments["load_format"] == load_format


def test_an_engine_of_several_ranks_starts_its_own_processes(tmp_path: Path) -> None:
    """Left to itself vLLM makes actors when an actor starts it, in bundles that nobody reserved."""
    one, two = (
        settings.engine_arguments(config(tmp_path, sampler={"parallel": {"tensor": size}}), 0, "cpu") for size in (1, 2)
    )
    assert "distributed_executor_backend" not in one and two["distributed_executor_backend"] == "mp"


def test_merged_weights_need_no_lora_in_vllm(tmp_path: Path) -> None:
    merged = {"content": "merged"}
    arguments = settings.engine_arguments(config(tmp_path, lora={"r": 600}, checkpoint_engine=merged), 0, "cpu")
    assert arguments["enable_lora"] is False
    assert not [name for name in arguments if "loras" in name or "lora_rank" in name]
    assert settings.engine_arguments(config(tmp_path), 0, "cpu")["enable_lora"] is True
    run = config(tmp_path, checkpoint_engine=merged, sampler={"engine_args": {"enable_lora": True}})
    with pytest.raises(ConfigError, match=r"enable_lora is True.*use checkpoint_engine\.content"):
        settings.engine_arguments(run, 0, "cpu")


@pytest.mark.parametrize(
    ("content", "tied", "taken"), [("merged", False, True), ("merged", True, False), ("adapter", False, False)]
)
def test_adapters_of_untied_embeddings_are_sampled_merged(
    tmp_path: Path, content: str, tied: bool, taken: bool
) -> None:
    run = config(tmp_path, checkpoint_engine={"content": content}, lora={"target_modules": ["lm_head", "q_proj"]})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "tie_word_embeddings": tied}))
    if taken:
        settings.check_sampled(run)
    else:
        with pytest.raises(UnsupportedError, match="does not support adapters of 'lm_head'; supported are attention"):
            settings.check_sampled(run)


def vllm_source(module: str) -> str:
    """Return the source of a vLLM module, found without importing vLLM."""
    result = subprocess.run(
        [sys.executable, "-c", "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    return (Path(result.stdout.strip()) / module).read_text()


def test_every_sampling_parameter_of_vllm_that_shapes_the_distribution_is_explicit(tmp_path: Path) -> None:
    tree = ast.parse(vllm_source("sampling_params.py"))
    [cls] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"]
    fields = {
        node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    given = set(settings.sampling_arguments(config(tmp_path), (2,), 7))
    assert given <= fields
    shaping = {
        name
        for name in fields
        if name.startswith(("top_", "min_", "temp", "repetition_p", "presence", "freq", "logit_b"))
    }
    assert shaping <= given


def test_vllm_reads_text_only_for_stop_strings_and_never_ends_at_its_tokenizers_eos(tmp_path: Path) -> None:
    plain, stopped = config(tmp_path), config(tmp_path, sampler={"stop": ["</answer>", "\n\n"]})
    for run, stop, reads_text in ((plain, None, False), (stopped, ["</answer>", "\n\n"], True)):
        assert settings.engine_arguments(run, 0, "cpu")["skip_tokenizer_init"] is not reads_text
        given = settings.sampling_arguments(run, (2, 5), 7)
        assert (given["stop"], given["detokenize"]) == (stop, reads_text)
        assert (given["stop_token_ids"], given["ignore_eos"]) == ([2, 5], True)
    with pytest.raises(ConfigError, match=r"sampler\.stop\.0"):
        config(tmp_path, sampler={"stop": [""]})


def test_the_ranks_are_vllms(tmp_path: Path) -> None:
    source = vllm_source("config/lora.py")
    [line] = [line for line in source.splitlines() if line.startswith("MaxLoRARanks = ")]
    namespace: dict = {}
    exec(f"from typing import Literal\n{line}", namespace)
    assert get_args(namespace["MaxLoRARanks"]) == adapters.LORA_RANKS


def test_settings_need_no_vllm() -> None:
    script = "import sys, megarl.sampler.engine.settings, megarl.sampler.drawing.gate; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias true of its config"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window is 64 .* is 768; the sampler supports"),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, "sliding_window is 64"),
    ],
)
def test_attention_that_vllm_computes_otherwise_is_refused(tmp_path: Path, shape: dict, message: str) -> None:
    run = config(tmp_path, sampler={"max_prompt_tokens": 512, "max_response_tokens": 256})
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(UnsupportedError, match=message):
        settings.check_sampled(run)


def test_windows_that_are_not_used_or_not_exceeded_are_sampled(tmp_path: Path) -> None:
    run = config(tmp_path, sampler={"max_prompt_tokens": 512, "max_response_tokens": 256})
    for shape in ({"model_type": "mistral"}, {"model_type": "qwen2", "sliding_window": 64}):
        (tmp_path / "config.json").write_text(json.dumps(shape))
        settings.check_sampled(run)


@pytest.mark.parametrize("token", [40, -1])
def test_a_stop_token_outside_the_vocabulary_is_refused(tmp_path: Path, token: int) -> None:
    run = config(tmp_path)
    for eos, right in ((39, True), (token, False)):
        shape = {"model_type": "llama", "vocab_size": 40, "eos_token_id": [3, eos]}
        (tmp_path / "config.json").write_text(json.dumps(shape))
        if right:
            settings.check_sampled(run)
        else:
            with pytest.raises(ConfigError, match=f"eos_token_id {token} is outside the model's vocabulary of 40"):
                settings.check_sampled(run)


def test_vllm_gets_the_arguments_that_megarl_does_not_set(tmp_path):
    given = config(tmp_path, sampler={"engine_args": {"swap_space": 2}})
    assert settings.engine_arguments(given, 0, "cpu")["swap_space"] == 2


@pytest.mark.parametrize(
    ("argument", "message"),
    [("tensor_parallel_size", "use sampler.parallel.tensor"), ("logprobs_mode", "megarl depends on its value")],
)
def test_an_engine_argument_that_megarl_sets_is_refused(tmp_path, argument, message):
    with pytest.raises(ConfigError, match=f"sampler.engine_args.{argument} is 2, which megarl sets itself; {message}"):
        settings.check_sampled(config(tmp_path, sampler={"engine_args": {argument: 2}}))


@pytest.mark.parametrize(("tensor", "dtype", "gib"), [(1, "float32", 0.5), (1, "bfloat16", 0.25), (2, "float32", 0.25)])
def test_a_cache_below_one_sequence_is_refused(tmp_path: Path, tensor: int, dtype: str, gib: float) -> None:
    shape = {"model_type": "qwen3", "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 8}
    for part, fits in ((0.99, False), (1.01, True)):
        sampler = {"kv_cache_gib": gib * part, "max_prompt_tokens": 1024, "max_response_tokens": 1024}
        sampler["parallel"] = {"tensor": tensor}
        run = config(tmp_path, sampler=sampler, model={"path": str(tmp_path), "dtype": dtype})
        (tmp_path / "config.json").write_text(json.dumps(shape | {"head_dim": 128}))
        if fits:
            settings.check_sampled(run)
        else:
            with pytest.raises(ConfigError, match=rf"kv_cache_gib is .* 2048 tokens needs {gib} GiB on each rank"):
                settings.check_sampled(run)


@pytest.mark.parametrize(
    ("sections", "top", "requests", "count"),
    [
        ({}, 512, 64, 23),
        ({"train": {"prompts_per_step": 4}}, 64, 32, 11),
        ({"train": {"prompts_per_step": 4}, "sampler": {"engines": 2}}, 48, 24, 9),
        ({"train": {"prompts_per_step": 4}, "task": {"name": "arithmetic", "held_out": 8}}, 512, 256, 23),
        ({"sampler": {"max_num_seqs": 20}}, 40, 20, 9),
        ({"sampler": {"max_num_seqs": 512}, "train": {"prompts_per_step": 128}}, 768, 512, 25),
        ({"sampler": {"max_num_seqs": 2048}, "train": {"prompts_per_step": 512}}, 992, 992, 27),
        ({"train": {"prompts_per_step": 3}, "sampler": {"samples_per_prompt": 7}}, 42, 21, 10),
    ],
)
def test_graphs_are_captured_for_sizes_that_can_occur(tmp_path: Path, sections, top, requests, count) -> None:
    engine = config(tmp_path, **sections).engine
    arguments = settings.engine_arguments(engine, 0, "cuda")
    sizes = arguments["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes[-1] == top and requests in sizes and len(sizes) == count
    # A batch is padded by less than a quarter, or less than 8.
    assert all(b - a <= max(8, 0.34 * a) for a, b in itertools.pairwise(sizes))
    assert sizes[:4] == [1, 2, 4, 8] and sizes == sorted(set(sizes))
    assert "compilation_config" not in settings.engine_arguments(engine, 0, "cpu")


def test_overlapping_versions_have_three_slots_and_need_adapters(tmp_path: Path) -> None:
    slots = [
        settings.engine_arguments(config(tmp_path, checkpoint_engine={"in_flight": way}).engine, 0, "cpu")["max_loras"]
        for way in ("drain", "overlap")
    ]
    assert slots == [2, 3]
    merged = config(tmp_path, checkpoint_engine={"in_flight": "overlap", "content": "merged"}).engine
    with pytest.raises(ConfigError, match=r"in_flight is 'overlap' .* use content: adapter, or in_flight: drain"):
        settings.check_sampled(merged)


def test_the_users_own_compilation_config_is_kept(tmp_path: Path) -> None:
    own = {"cudagraph_mode": "PIECEWISE"}
    engine = config(tmp_path, sampler={"engine_args": {"compilation_config": own}}).engine
    assert settings.engine_arguments(engine, 0, "cuda")["compilation_config"] == own
