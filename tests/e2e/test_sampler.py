# SPDX-License-Identifier: Apache-2.0
"""Promise 4, on real engines: vLLM samples from exactly what the trainer holds, or not at all.

The engines run in processes of their own (``sampler_scenarios``).
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.sampler_faults import EXPERT_FAULT_CAUSES, FAULT_CAUSES, MERGED_FAULT_CAUSES
from tests.e2e.sampler_processes import TIMEOUT, Scenarios


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    started = Scenarios(tmp_path_factory.mktemp("sampler"))
    yield started
    started.close()


def results_of(scenario: str) -> Any:
    """Return the fixture of a scenario's results."""

    @pytest.fixture(scope="module", name=scenario)
    def results(scenarios: Scenarios) -> dict[str, Any]:
        return scenarios[scenario]

    return results


llama, qwen3, moe, merged = map(results_of, ("llama", "qwen3", "moe", "merged"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT)]


def test_nothing_is_sampled_before_the_first_sync(llama: dict) -> None:
    assert llama["before_sync"].startswith("StaleVersionError") and "holds none" in llama["before_sync"]


def test_an_adapter_without_its_base_is_refused(llama: dict) -> None:
    assert "before the base weights" in llama["adapter_before_base"]
    assert llama["base_only"].startswith("StaleVersionError")


def test_logprobs_equal_peft_for_each_version_and_not_for_the_one_before(llama: dict) -> None:
    assert max(llama["errors"]) < 1e-4
    assert min(llama["errors_of_previous"]) > 1e-1


def test_another_version_than_the_resident_one_is_refused(llama: dict) -> None:
    assert llama["wrong_version"] == (
        "StaleVersionError: asked for policy version 0, but the sampler holds version 1; sync it first"
    )
    assert llama["stamps"] == [1]


def test_all_eos_tokens_stop_and_belong_to_the_response(llama: dict) -> None:
    assert llama["stops_end_with"] == [3, 7]
    assert llama["stop_inside"] == 0
    assert llama["lengths_of_length"] == [16]


@pytest.mark.parametrize("which", ["empty", "long", "unknown"])
def test_bad_prompts_are_refused(llama: dict, which: str) -> None:
    assert llama["bad_prompts"][which].startswith("DataError: prompt 0")


def test_a_version_that_arrives_while_another_decodes_leaves_it_exact(llama: dict) -> None:
    assert llama["overlapped"], "the first request ended too early to prove anything"
    assert llama["overlap_error"] < 1e-4
    assert llama["held_during"] == [[2, 3], [2]]
    # A version that nobody samples from is dropped as soon as the workers wait for the next one.
    held, in_use = llama["held_after"]
    assert 4 in held and set(held) <= {3, 4} and in_use == []


def test_a_third_live_version_is_refused_and_the_engine_lives(llama: dict) -> None:
    assert llama["third_overlapped"], "the first request ended too early to prove anything"
    assert "version 102 would be live version 3 of an engine that holds 2: version 100 (" in llama["third"]
    assert llama["third_held"] == [[101, 102], [101]]
    assert llama["third_ended"].startswith("WeightSyncError: the sampler refuses")
    assert llama["third_at_once"] and llama["after_third"] < 1e-4


def test_a_score_begins_before_requests_that_wait(llama: dict) -> None:
    assert llama["score_overlapped"], "the requests ended too early to prove anything"
    assert llama["score_first"]


@pytest.mark.parametrize(
    ("scenario", "way"),
    [*itertools.product(["llama", "merged"], ["drain", "abort", "continue"]), ("llama", "overlap")],
)
def test_requests_in_flight_end_move_or_go_on_and_every_token_is_of_its_version(
    scenarios: Scenarios, scenario: str, way: str
) -> None:
    moved = scenarios[scenario]["moves"][way]
    assert moved["overlapped"], "the requests ended too early to prove anything"
    assert moved["error"] < 1e-4 and moved["late_error"] < 1e-4 and moved["score_error"] < 1e-4
    assert moved["whole"] and moved["held"]
    assert (moved["made_by_new"] > 0) is (way in ("abort", "continue"))
    assert (moved["changed"] > 0) is (way == "continue")


def test_a_third_version_waits_for_a_slot_if_versions_overlap(llama: dict) -> None:
    third = llama["moves"]["third"]
    assert third["overlapped"], "the requests ended too early to prove anything"
    assert third["waited"] and third["drawn"] == [300]


@pytest.mark.parametrize("rslora", [False, True])
def test_rank_and_alpha_patterns_equal_peft(llama: dict, rslora: bool) -> None:
    assert llama[f"patterns_rslora_{rslora}"] < 1e-4


@pytest.mark.parametrize(("name", "cause"), FAULT_CAUSES.items())
def test_a_damaged_adapter_is_refused_by_name_and_ends_generation(llama: dict, name: str, cause: str) -> None:
    sync, old, new, again = llama["faults"][name]
    assert sync.startswith("WeightSyncError") and cause in sync
    assert old.startswith("WeightSyncError: the sampler refuses") and new.startswith("WeightSyncError")
    assert "an earlier sync failed" in again


def test_fifty_versions_leave_nothing_behind(llama: dict) -> None:
    assert llama["most_resident"] <= 2
    assert llama["left_in_shm"] == []
    assert llama["mapped"] == [1]


def test_fifty_versions_leave_the_base_bit_identical(llama: dict) -> None:
    assert llama["base_unchanged"]
    assert llama["error_after_50"] < 1e-4


def test_a_base_with_a_missing_or_unknown_tensor_is_refused_by_name(llama: dict) -> None:
    assert "no tensor reached: 'model.layers.1.self_attn.k_proj.weight'" in llama["base_missing"]
    assert llama["after_base_missing"].startswith("WeightSyncError: the sampler refuses")
    assert "'model.layers.0.mlp.extra.weight'" in llama["base_extra"]


def test_a_new_base_gives_hugging_faces_logprobs(llama: dict) -> None:
    assert llama["after_base"].startswith("StaleVersionError")
    assert llama["base_error"] < 1e-4
    assert llama["base_error_of_old"] > 1e-1


def test_a_killed_engine_is_an_error_at_once(llama: dict) -> None:
    assert llama["death"]["during"].startswith("WorkerError")
    assert llama["death"]["after"].startswith("WorkerError")
    assert llama["death"]["sync"].startswith("WeightSyncError")
    assert llama["death"]["seconds"] < 10


def test_an_engine_killed_in_a_sync_is_an_error_at_once(scenarios: Scenarios) -> None:
    death = scenarios["qwen2"]["death_in_sync"]
    assert "sampler 0, transfer: the engine process of sampler 0 died" in death["error"]
    assert death["seconds"] < 10  # the timeout is 60


def test_logprobs_are_those_of_the_tempered_untruncated_distribution(qwen3: dict) -> None:
    assert qwen3["error"] < 1e-4, qwen3["places"]
    assert qwen3["error_at_temperature_1"] > 1e-2
    # generation_config.json has top_k 2; 400 first tokens of random prompts must be more than that many.
    assert qwen3["first_tokens"] > 20
    assert qwen3["samples_differ"] > 0.9


def test_kept_logprobs_are_bit_for_bit_vllms_own(qwen3: dict) -> None:
    for found, samples in zip(qwen3["logprobs"], (96, 48, 24), strict=True):
        assert found["source"] == "worker" and found["equal"] and found["left"] == 0
        assert samples / 2 <= found["samples"] <= samples and found["tokens"] > 2 * found["samples"]


def test_the_samples_of_a_prompt_share_its_prefill(qwen3: dict) -> None:
    found, prompts, samples, length = qwen3["prefill"], 8, 4, 96
    assert found["samples"] == prompts * samples and found["prompt_tokens"] == prompts * samples * length
    # Each sample but the first computes only the last block, of 32 tokens on a CPU: its last token must be.
    assert found["computed"] == prompts * (length + (samples - 1) * 32)


def test_the_same_calls_give_the_same_completions(qwen3: dict) -> None:
    assert qwen3["tokens"] > 4096, "the batch must exceed one step's budget"
    assert qwen3["same_again"] > 0.97
    assert qwen3["orders"]["true"] == 0, "the order of a reproducible batch's prompts counts"


def test_gloo_and_shm_bring_bitwise_the_same_adapter(qwen3: dict) -> None:
    assert qwen3["checksums"][0] == qwen3["checksums"][1]
    assert qwen3["shm_error"] < 1e-4


def test_an_engine_that_a_failed_sync_left_behind_comes_back(qwen3: dict) -> None:
    back = qwen3["readmission"]
    assert "holds a value that is not finite" in back["failed"] and back["stale"] == ["sampler 0"]
    assert all(back[name].startswith("WeightSyncError: the sampler refuses") for name in ("refused", "still_stale"))
    assert "sampler 0 was not readmitted since" in back["not_yet"]
    assert back["in_flight"] > 0, "the requests ended too early to prove anything"
    assert back["ended"].startswith("WeightSyncError")
    assert "do not agree" in back["canary"]
    assert back["kinds"] == ["base", "adapter"] and back["checked"] == ["sampler 0"]
    assert back["error"] < 1e-4 and back["next_error"] < 1e-4


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(scenarios: Scenarios) -> None:
    stop = scenarios["qwen2"]["stop"]
    assert stop["by_text"] > 0
    assert stop["by_id"] > 0
    # Nothing else ends one, not even the end of sequence that only the tokenizer knows.
    assert stop["tokenizers_eos_inside"] > 0
    assert stop["by_neither"] == stop["too_late"] == stop["overlooked"] == stop["model_eos_inside"] == 0


def test_attention_biases_arrive(scenarios: Scenarios) -> None:
    assert scenarios["qwen2"]["error"] < 1e-4


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("part", ["all", "again", "router", "experts", "attention", "stacked", "doubled", "gate_up"])
def test_adapters_of_routers_and_experts_count_as_in_peft(moe: dict, family: str, part: str) -> None:
    assert moe[family]["errors"][part] < 1e-4
    assert moe[family]["effects"][part] > 1e-1


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_another_adapter_of_experts_gives_other_logprobs(moe: dict, family: str) -> None:
    assert moe[family]["error_of_previous"] > 1e-1


@pytest.mark.parametrize(("name", "cause"), EXPERT_FAULT_CAUSES.items())
def test_damaged_experts_are_refused_by_name(moe: dict, name: str, cause: str) -> None:
    outcome = moe["qwen3_moe"]["faults"][name]
    assert outcome.startswith("WeightSyncError") and cause in outcome


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_new_base_weights_of_experts_give_hugging_faces_logprobs(moe: dict, family: str) -> None:
    assert moe[family]["error_of_new_base"] < 1e-4
    assert moe[family]["error_of_old_base"] > 1e-1


def test_merged_weights_give_pefts_logprobs_for_each_version_and_not_for_the_one_before(merged: dict) -> None:
    assert max(merged["errors"]) < 1e-4
    assert min(merged["errors_of_previous"]) > 1e-1
    assert merged["wrong_version"] == (
        "StaleVersionError: asked for policy version 1, but the sampler holds version 2; sync it first"
    )
    assert merged["stamps"] == [2]


def test_merged_syncs_send_the_blocks_that_change_and_leave_all_other_weights(merged: dict) -> None:
    # q, k, v, o, two norms of heads; gate, up, down; of two layers.
    assert merged["counts"] == [18, 18, 18]
    first, *others = ({name: digest for part in held for name, digest in part.items()} for held in merged["held"])
    for weight in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"):
        [name] = [name for name in first if name.endswith(weight)]
        assert all(other[name] == first[name] for other in others)


def test_merged_weights_need_their_base(merged: dict) -> None:
    assert "merged version 0 came before the base weights" in merged["before_base"]


def test_no_keys_and_values_of_an_older_version_are_read(merged: dict) -> None:
    assert merged["prompt_tokens"] > 64
    assert max(merged["errors_of_shared_prompt"]) < 1e-4
    assert merged["error_with_kept_cache"] > 1e-1, "the test would not notice stale keys and values"


def test_merged_weights_are_never_written_under_running_requests(merged: dict) -> None:
    assert re.search(r"merged weights came while \d+ requests run", merged["in_flight"])
    assert merged["in_flight_ended"].startswith("WeightSyncError: the sampler refuses")


def test_an_adapter_is_no_version_of_an_engine_for_merged_weights(merged: dict) -> None:
    sync, *refused, again = merged["adapter"]
    assert "adapter weights came, but the engine was started with checkpoint_engine.content=merged" in sync
    assert all(one.startswith("WeightSyncError: the sampler refuses") for one in refused)
    assert again < 1e-4


@pytest.mark.parametrize(("name", "cause"), MERGED_FAULT_CAUSES.items())
def test_damaged_merged_weights_are_refused_by_stage_and_name_until_base_and_policy_come_again(
    merged: dict, name: str, cause: str
) -> None:
    sync, old, new, again = merged["faults"][name]
    assert sync.startswith("WeightSyncError: merged of version 41 was not synced: ") and cause in sync
    assert all(one.startswith("WeightSyncError: the sampler refuses") for one in (old, new))
    assert again < 1e-4


def test_merged_experts_routers_and_embeddings_give_pefts_logprobs(scenarios: Scenarios) -> None:
    experts = scenarios["merged_moe"]
    assert "merged version 3 lacks 'model.layers.0.self_attn.k_norm.weight', " in experts["other_targets"]
    assert "sync kind 'base' first" in experts["other_targets"]
    assert max(experts["errors"]) < 1e-4
    assert min(experts["effects"]) > 1e-1 and min(experts["errors_of_previous"]) > 1e-1
