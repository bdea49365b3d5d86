# SPDX-License-Identifier: Apache-2.0
"""Test `megarl bench rollout` around its engines, which stand-ins replace: what is asked for, counted and printed."""

import json
from pathlib import Path

import numpy as np
import pytest

from megarl.bench.rollouts import rollout
from megarl.bench.rollouts.settings import parse_rollout_settings
from megarl.cli.main import main
from megarl.config import EngineConfig, ModelConfig
from megarl.errors import ConfigError
from megarl.files import read_json
from megarl.sampler.engine.settings import stop_tokens
from megarl.sampler.plain import rates as rates_module
from megarl.sampler.plain.rates import Load, rates
from megarl.types import Completion

# Seconds that a completion takes, by source of its logprobs.
SECONDS = {"worker": 0.5, "vllm": 1.0, "none": 0.25}


def test_rates_are_those_of_the_timed_rounds_and_prompts_are_never_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen, calls = [0.0], [], []
    monkeypatch.setattr(rates_module.time, "perf_counter", lambda: now[0])

    def way(name: str, seconds: float):
        def sample(prompts: list[np.ndarray]) -> int:
            calls.append(name)
            warms_up = (len(calls) - 1) % 5 == 0  # the first of five calls: one, and two rounds of both ways
            now[0] += 100.0 if warms_up else seconds
            seen.extend(prompt.tobytes() for prompt in prompts)
            return 10 * len(prompts)

        return sample

    load = Load([4, 8], samples=2, prompt_tokens=16, vocabulary=500, response_tokens=10, rounds=2, seed=0)
    found = rates(load, {"a": way("a", 0.5), "b": way("b", 2.0)})
    assert found == {"a": [20 / 0.5, 40 / 0.5], "b": [20 / 2.0, 40 / 2.0]}
    assert calls == ["a", "a", "b", "a", "b"] * 2
    assert len(set(seen)) == len(seen) == 5 * (2 + 4)


class Engine:
    """Stands for ``SamplerProcess``."""

    name, receivers = "sampler 0", 1
    started: list[dict] = []  # noqa: RUF012
    clock = [0.0]  # noqa: RUF012

    def __init__(self, **arguments) -> None:
        self.arguments = arguments
        self.started.append(arguments)
        self.start_seconds = {"adapter": 60.0, "merged": 35.0}[arguments["checkpoint_engine"]["content"]]

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def wait(self) -> None:
        pass

    def use_base(self, version: int) -> None:
        self.version = version

    def take_logprobs_from(self, source: str) -> None:
        self.source = source

    def generate(self, prompts: list[np.ndarray], version: int) -> list[list[Completion]]:
        assert version == self.version
        samples, length = (self.arguments["sampler"][name] for name in ("samples_per_prompt", "max_response_tokens"))
        self.clock[0] += SECONDS[self.source]
        none = np.zeros(length, np.int64)
        one = Completion(prompts[0], none, none.astype(np.float32), none, "length")
        return [[one] * samples for _ in prompts]


class Manager:
    def __init__(self, source, engines: list[Engine], section) -> None:
        self.source, self.engine = source, engines[0]

    def sync(self, version: int, kind: str) -> None:
        assert kind == "adapter" and all(".lora_" in name for name, _ in self.source.export_weights(True))
        self.engine.version = version


def test_one_command_prints_every_rate(tmp_path, capsys, monkeypatch) -> None:
    plain = []

    def time_plain(settings: dict, log: Path) -> dict:
        plain.append(settings)
        assert stop_tokens(settings["arguments"]["model"]) == ()
        assert read_json(Path(settings["adapter"]) / "adapter_config.json", "adapter", ConfigError)["r"] == 4
        rate = {"vllm": [10.0, 20.0], "none": [40.0, 64.0]}
        return {"start_seconds": 3.0, "rates": {"adapter": rate, "base": rate}}

    monkeypatch.setattr(rollout, "SamplerProcess", Engine)
    monkeypatch.setattr(rollout, "CheckpointEngineManager", Manager)
    monkeypatch.setattr(rollout, "time_plain_rollouts", time_plain)
    monkeypatch.setattr(rates_module.time, "perf_counter", lambda: Engine.clock[0])
    options = ["r=4", "device=cpu", "dtype=float32", "concurrency=[4,8]", "response_tokens=8"]
    assert main(["bench", "rollout", "tiny", *options, "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out.splitlines()[-1])
    rate = {"worker": [64.0, 128.0], "vllm": [32.0, 64.0], "none": [128.0, 256.0]}
    assert report["start_seconds"] == {"adapter": 60.0, "merged": 35.0, "plain adapter": 3.0}
    assert report["rates"] == {"adapter": rate, "base": rate, "merged": rate}
    assert [one["checkpoint_engine"]["content"] for one in Engine.started] == ["adapter", "merged"]
    assert len(plain) == 1 and plain[0]["load"]["concurrency"] == [4, 8] and plain[0]["arguments"]["max_lora_rank"] == 8
    rows = [line.split() for line in out.splitlines()]
    assert ["base", "8", "128", "64", "256", "50.0%", "20", "64", "200.0%"] in rows
    assert ["merged", "4", "64", "32", "128", "50.0%", "-", "-", "-"] in rows
    assert "merged: an engine starts" in err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["concurrency=[6]"], "concurrency 6 must be a multiple of samples (4)"),
        (["concurrency=[]"], "concurrency"),
        (["content=[adapter]"], "did you mean 'contents'"),
        (["plain=[base]"], "plain"),
    ],
)
def test_a_mistake_is_one_clear_error(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_rollout_settings("tiny", overrides)
    assert message in str(raised.value)


def test_engines_of_named_shapes_fit_the_largest_concurrency() -> None:
    settings = parse_rollout_settings("qwen3-0.6b")
    section = rollout._engine(settings, Path("model"), "adapter")["sampler"]
    assert section["max_num_seqs"] == 512 and settings.contents == ["adapter", "merged"]
    assert EngineConfig(model=ModelConfig(path="model")).sampler.logprobs == "worker"
