# SPDX-License-Identifier: Apache-2.0
"""Test `megarl bench train`: its counts, its refusals, and one whole comparison on the CPU."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.bench.report import table
from megarl.bench.settings import model_config
from megarl.bench.training import train
from megarl.bench.training.batch import make_samples
from megarl.bench.training.flops import work_per_token
from megarl.bench.training.megarl_step import MegarlStep
from megarl.bench.training.profile import by_kind, pauses
from megarl.bench.training.settings import parse_settings
from megarl.cli.main import main
from megarl.errors import CheckpointError, ConfigError, MegarlError
from megarl.folder_lock import FolderLock
from megarl.model.optimizer.gradient_record import GradientRecord


def test_operations_equal_what_torch_counts_in_hugging_face() -> None:
    """PEFT's own step, counted by torch, which sees attention only as products, and without their mask."""
    from megarl.bench.training.clock import Clock
    from megarl.bench.training.peft_step import PeftStep

    settings = parse_settings("tiny", ["sequences=2", "length=8", "dtype=float32", "r=4"])
    contender = PeftStep(settings)
    contender._model.get_base_model().set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        contender.step(Clock(torch.device("cpu")))
    config = model_config("tiny")
    heads = config["num_attention_heads"] * config["head_dim"]
    unmasked = 6 * 2 * config["num_hidden_layers"] * heads * (settings.length - (settings.length + 1) / 2)
    work = work_per_token(config, rank=4, length=settings.length, response=1.0)
    assert counter.get_total_flops() / settings.tokens == pytest.approx(work.lora + unmasked, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("qwen3-8", [], "did you mean 'qwen3-8b'"),
        ("tiny", ["lengths=4"], "did you mean 'length'"),
        ("tiny", ["steps=0"], "steps"),
        ("tiny", ["contenders=[tea]"], "'te'"),
        ("tiny", ["steps"], "key=value"),
        ("tiny", ["contenders=[te"], "bench: while parsing a flow sequence"),
    ],
)
def test_a_mistake_is_one_clear_error(model: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        parse_settings(model, overrides)


def test_only_the_end_of_a_sequence_is_trained_on() -> None:
    settings = parse_settings("tiny", ["sequences=3", "length=10", "response=0.3"])
    samples = make_samples(settings, 50)
    assert [int(sample.response_mask.sum()) for sample in samples] == [3, 3, 3]
    assert settings.response_tokens == 9
    assert all(sample.response_mask[-3:].all() and len(sample.tokens) == 11 for sample in samples)


def test_one_command_compares_all_contenders(tmp_path, capsys) -> None:
    """On a Hugging Face folder, so that both sides hold the same weights and their mean logprobs must agree."""
    from tests.helpers.models import make_model

    model = make_model(tmp_path / "model", "qwen3", tied=True)
    options = ["dtype=float32", "sequences=2", "length=12", "warmup=1", "steps=2", "contenders=[local,full,peft]"]
    assert main(["bench", "train", str(model), *options, "--profile", "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    printed = out.splitlines()
    assert "local (1 of 3): builds, 1 steps to warm up, 2 timed" in err and "peft: " in err
    report = json.loads(printed[-1])
    contenders = {result["name"]: result for result in report["contenders"]}
    assert set(contenders) == {"local", "full", "peft"} and not any("error" in result for result in contenders.values())
    assert contenders["local"]["trained_parameters"] == contenders["peft"]["trained_parameters"]
    assert (
        contenders["local"]["over_peft"] > 0 and contenders["local"]["lora_over_full"] > 0 and report["gemm_tflops"] > 0
    )
    assert set(contenders["local"]["phases"]) == {"forward", "logprobs", "backward", "optimizer"}
    # B is zero at the start, and the steps are small.
    assert contenders["local"]["logprob"] == pytest.approx(contenders["peft"]["logprob"], abs=1e-3)
    assert any(line.strip().startswith("local") for line in printed)
    assert "aten::" in (tmp_path / "out" / "profile-local.txt").read_text()
    assert contenders["local"]["device_ms"]["matrix products"] > 0
    assert any(
        line.split() == ["milliseconds", "of", "a", "step", "local", "full", "(local)", "peft", "(sdpa)"]
        for line in printed
    )


def test_pauses_are_when_no_stream_has_a_kernel() -> None:
    kernels = [(5.0, 7.0, "c"), (0.0, 2.0, "a"), (1.0, 3.0, "b"), (9.0, 10.0, "e"), (6.0, 8.0, "d")]
    assert [pause[1:] for pause in pauses(kernels)] == [(2.0, "b", "c"), (1.0, "d", "e")] and pauses([]) == []


def test_kernels_are_counted_by_kind() -> None:
    names = {
        "nvjet_sm90_tst_128x256_64x4_2x1_v_badd_coopA_TNN": "matrix products",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "matrix products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention",
        "void cudnn::fusion::fmha_reduce_head_ragged<true>(void const*)": "attention",
        "void transformer_engine::dgated_act_kernel<16, true, float>": "norms, RoPE, activations",
        "_heads_backward": "norms, RoPE, activations",
        "_prepare": "pointwise with adapters",
        "_through": "pointwise with adapters",
        "_slope": "softmax of logits",
        "_divide": "softmax of logits",
        "_attend": "attention",
        "_by_key": "attention",
        "_expand": "matrix products",
        "_matmul": "matrix products",
        "_norm": "norms, RoPE, activations",
        "_rotate": "norms, RoPE, activations",
        "void multi_tensor_apply_kernel<TensorListMetadata<4, false>>": "optimizer",
        "void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add<c10::BFloat16>>": "copies, sums, zeros",
        "Memset (Device)": "copies, sums, zeros",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "communication",
        "something_new": "other",
    }
    seconds = by_kind((name, 1.0) for name in names)
    assert seconds == {kind: float(list(names.values()).count(kind)) for kind in seconds}
    assert sum(seconds.values()) == len(names)


def test_a_contender_that_fails_does_not_stop_the_others(tmp_path, monkeypatch) -> None:
    settings = parse_settings("tiny", ["contenders=[local,peft]"])

    def run(name, settings, out, flags=(), label=None):
        good = {"name": name, "ranks": 1, "tokens_per_second": 2.0, "peak_gib": 1.0, "backend": "sdpa", "tflops": 1.0}
        return {"name": name, "error": "CUDA out of memory"} if name == "local" else good

    monkeypatch.setattr(train, "run_contender", run)
    report = train.bench_train(settings, tmp_path, profile=False)
    assert [result["name"] for result in report["contenders"]] == ["local", "peft"]
    assert report["contenders"][0]["error"] == "CUDA out of memory"


def test_what_bitwise_costs_is_said(tmp_path, monkeypatch) -> None:
    """A step of it against one of ``local``; where the layers refuse, the reason."""
    refused = train.left_out(parse_settings("tiny", ["contenders=[local,bitwise]"]))
    assert list(refused) == ["bitwise"] and "head_dim of config.json = 32" in refused["bitwise"]
    settings = parse_settings("qwen3-0.6b", ["contenders=[local,bitwise]"])
    assert train.left_out(settings) == {}
    assert train.left_out(parse_settings("qwen3-0.6b", ["contenders=[local,bitwise]", "cuda_graphs=true"])) == {}
    compiled = train.left_out(parse_settings("qwen3-0.6b", ["contenders=[local,bitwise]", "compile=true"]))
    assert "train.compile = True" in compiled["bitwise"]

    def run(name, settings, out, flags=(), label=None):
        shared = {"ranks": 1, "tokens_per_second": 2.0, "peak_gib": 1.0, "backend": "local", "tflops": 1.0}
        times = {"phases": {}, "logprob_pass_ms": 1.0, "step_ms": 15.0 if name == "bitwise" else 10.0}
        return shared | times | {"name": name}

    monkeypatch.setattr(train, "run_contender", run)
    report = train.bench_train(settings, tmp_path, profile=False)
    assert "bitwise: a step takes 1.50x the time of local's" in table(report).splitlines()


def test_two_benches_do_not_mix_their_results_in_one_folder(tmp_path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(CheckpointError, match="is in use by process"):
        train.bench_train(parse_settings("tiny", []), tmp_path, profile=False)
    lock.release()


def test_a_step_that_trains_a_part_of_its_adapter_is_not_measured() -> None:
    step, record = object.__new__(MegarlStep), GradientRecord(["q.lora_A.weight", "q.lora_B.weight"])
    step._checked, step._model = False, SimpleNamespace(optimizer=SimpleNamespace(coverage=record))  # type: ignore[assignment]
    record.take(torch.tensor([1.0, 0.0, 1.0]))
    step._check_gradients()  # as B was 0, A has no gradient
    record.take(torch.tensor([1.0, 0.0, 1.0]))
    with pytest.raises(MegarlError, match=r"1 matrices of the adapter get no gradient:\s+q.lora_A.weight"):
        step._check_gradients()
