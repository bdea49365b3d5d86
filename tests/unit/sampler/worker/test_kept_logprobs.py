# SPDX-License-Identifier: Apache-2.0
"""Keep logprobs in the worker beside steps, outputs and engines of every kind; the real engine is in tests/e2e."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.errors import WorkerError
from megarl.sampler.drawing.fetched_logprobs import KEY, SPACING_SECONDS, FetchedLogprobs, pack, unpack

vllm = pytest.importorskip("vllm")
kept_logprobs = pytest.importorskip("megarl.sampler.worker.kept_logprobs")


def lists(ids: list[int], logprobs: list[float]) -> SimpleNamespace:
    """Return what vLLM does for ``logprobs=0``: a row for each request of the step, also if it drew nothing."""
    column = (len(ids), 1)
    return SimpleNamespace(
        logprob_token_ids=np.array(ids).reshape(column), logprobs=np.array(logprobs, np.float32).reshape(column)
    )


def new(name: str, *, own: str | None = None, logprobs: int | None = 0) -> SimpleNamespace:
    sampling = SimpleNamespace(logprobs=logprobs, extra_args=None if own is None else {KEY: own})
    return SimpleNamespace(req_id=name, sampling_params=sampling, prompt_token_ids=[1] * 40, num_computed_tokens=32)


class ModelRunner:
    """Stands for vLLM's model runner: a step draws token 10 of each request, and says which were scheduled."""

    def __init__(self, later: bool) -> None:
        self.later, self.step = later, 0

    def execute_model(self, scheduled: SimpleNamespace) -> None:
        self.scheduled = scheduled

    def sample_tokens(self, grammar: None) -> object:
        names = self.scheduled.names
        self.step += 1
        output = SimpleNamespace(
            req_ids=names,
            sampled_token_ids=[[10]] * len(names),
            logprobs=lists([10] * len(names), [-float(self.step)] * len(names)),
        )
        return Later(output) if self.later else output


class Later(kept_logprobs.AsyncModelRunnerOutput):
    def __init__(self, output: SimpleNamespace) -> None:
        self.output = output

    def get_output(self) -> SimpleNamespace:
        return self.output


@pytest.mark.parametrize("later", [False, True], ids=["at once", "asynchronous"])
def test_outputs_lose_logprobs_only_while_no_request_wants_them_from_vllm(later: bool) -> None:
    runner = ModelRunner(later)
    ours = kept_logprobs.Runner(runner, 4, 8)
    kept = ours.kept

    def step(names: list[str], begun: list, finished: set[str] = frozenset()) -> bool:
        runner.execute_model(SimpleNamespace(names=names, scheduled_new_reqs=begun, finished_req_ids=set(finished)))
        output = runner.sample_tokens(None)
        output = output.get_output() if isinstance(output, kept_logprobs.AsyncModelRunnerOutput) else output
        return output.logprobs is not None

    assert not step(["a-1"], [new("a-1", own="a"), new("plain", logprobs=None)])
    assert step(["a-1", "b"], [new("b")])
    assert step(["b", "a-1"], [])
    assert not step(["a-1"], [], {"b"})
    ids, logprobs = unpack(kept.take(["a"], []))["a"][0]
    assert ids.tolist() == [10] * 4 and logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert len(kept) == 0 and (ours.prompt_tokens, ours.computed_prompt_tokens) == (40, 8)


def test_samples_of_a_request_keep_their_order_and_steps_without_a_token_add_nothing() -> None:
    kept = kept_logprobs.KeptLogprobs(1, 4)  # grows
    for sample in (2, 0, 1):
        kept.begin(f"{sample}_sampler 0-7-abcdef01", "sampler 0-7")
    names = [f"{sample}_sampler 0-7-abcdef01" for sample in (1, 2, 0)]
    kept.add(names, [[11], [], [10]], lists([11, 99, 10], [-1.5, 9.0, -0.5]))
    kept.add(names, [[13], [22], []], lists([13, 22, 99], [-2.5, -3.5, 9.0]))
    kept.begin("0_sampler 0-7-abcdef01", "sampler 0-7")  # again, after it was preempted
    kept.add(names[2:], [[12]], lists([12], [-4.5]))
    answer = unpack(kept.take(["sampler 0-7", "unknown"], []))
    assert list(answer) == ["sampler 0-7"]
    found = {sample: (ids.tolist(), logprobs.tolist()) for sample, (ids, logprobs) in answer["sampler 0-7"].items()}
    assert found == {0: ([10, 12], [-0.5, -4.5]), 1: ([11, 13], [-1.5, -2.5]), 2: ([22], [-3.5])}
    # The step that was already under way when the request ended leaves nothing.
    kept.add(names, [[1], [1], [1]], lists([1, 1, 1], [0.0] * 3))
    assert len(kept) == 0 and unpack(kept.take(["sampler 0-7"], [])) == {}


def test_many_requests_come_and_go_in_any_order() -> None:
    random = np.random.default_rng(0)
    kept, expected, live = kept_logprobs.KeptLogprobs(2, 64), {}, []
    for number in range(400):
        if len(live) < 9:
            live.append(f"r{number:03d}")
            kept.begin(live[-1], live[-1])
            expected[live[-1]] = []
        names = [str(name) for name in random.permutation(live)]
        drew = random.random(len(names)) < 0.8
        ids, logprobs = random.integers(0, 1000, len(names)), random.standard_normal(len(names)).astype(np.float32)
        kept.add(names, [[int(one)] if yes else [] for one, yes in zip(ids, drew, strict=True)], lists(ids, logprobs))
        for name, one, logprob, yes in zip(names, ids, logprobs, drew, strict=True):
            if yes:
                expected[name].append((int(one), float(logprob)))
        ended = [name for name in live if len(expected[name]) > 40 or random.random() < 0.1]
        live = [name for name in live if name not in ended]
        answer = unpack(kept.take(ended[1:], ended[:1]))
        for name in ended[1:]:
            ids_, logprobs_ = answer[name][0]
            assert list(zip(ids_.tolist(), logprobs_.tolist(), strict=True)) == expected[name]
    assert len(kept) == len(live)


def test_several_tokens_in_a_step_and_a_foreign_id_are_errors() -> None:
    kept = kept_logprobs.KeptLogprobs(2, 4)
    with pytest.raises(RuntimeError, match="does not contain its own id 'b'"):
        kept.begin("a", "b")
    kept.begin("a", "a")
    with pytest.raises(RuntimeError, match="several tokens"):
        kept.add(["a"], [[1, 2]], lists([1, 2], [0.0, 0.0]))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline parallel"),
    ],
)
def test_engines_whose_logprobs_cannot_be_kept_say_why(changed: dict, reason: str | None) -> None:
    config = {"speculative_config": None, "parallel_config": SimpleNamespace(pipeline_parallel_size=1)} | changed
    said = kept_logprobs.refusal(SimpleNamespace(**config))
    assert said is None if reason is None else reason in said


def test_an_untested_release_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    assert "vLLM 0.99.1 is not among" in kept_logprobs.refusal(SimpleNamespace())


class Engine:
    """Stands for ``AsyncLLM``: answers with what is kept of each request, after 10 ms."""

    errored = False

    def __init__(self, kept: dict[str, list[list[int]]], reason: str = "") -> None:
        self.kept, self.reason, self.calls = kept, reason, list[tuple]()

    async def collective_rpc(self, call: str, args: tuple) -> list:
        assert call == "megarl_call"
        method, arguments = args
        if method == "megarl_keep_logprobs":
            return [[True, ""], [True, self.reason]]
        self.calls.append(tuple(arguments))
        await asyncio.sleep(0.01)
        kept = pack(
            (name, sample, np.array(ids, np.int32), -np.array(ids, np.float32))
            for name in arguments[0]
            for sample, ids in enumerate(self.kept[name])
        )
        return [[True, b""], [True, kept]]


def fetched(engine: Engine, busy: bool = False) -> FetchedLogprobs:
    return FetchedLogprobs("sampler 0", lambda: engine, lambda: busy)


def outputs(*samples: list[int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(token_ids=ids, logprobs=[]) for ids in samples]


@pytest.mark.parametrize("busy", [False, True])
def test_requests_that_end_together_are_fetched_together(busy: bool) -> None:
    engine = Engine({f"r{number}": [[number, 1, 2], [3]] for number in range(20)})

    async def run() -> list:
        of = fetched(engine, busy)
        await of.start()
        of.drop("gone")
        # vLLM stopped before the worker's last token of the first sample.
        one = await of.of("r0", outputs([0, 1], [3]))
        return [
            one,
            *await asyncio.gather(*(of.of(f"r{number}", outputs([number, 1], [3])) for number in range(1, 20))),
        ]

    began = asyncio.new_event_loop().time()
    answers = asyncio.run(run())
    assert [one.tolist() for one in answers[5]] == [[-5.0, -1.0], [-3.0]]
    assert [len(names) for names, _ in engine.calls] == [1, 19]
    assert [dropped for _, dropped in engine.calls] == [["gone"], []]
    assert (asyncio.new_event_loop().time() - began >= SPACING_SECONDS) is busy


def test_other_tokens_than_those_returned_are_an_error() -> None:
    async def run(ids: list[int]) -> None:
        of = fetched(Engine({"r": [[1, 2]]}))
        await of.start()
        await of.of("r", outputs(ids))

    for ids in ([1, 3], [1, 2, 4]):
        with pytest.raises(WorkerError, match="kept logprobs of other tokens than request r returned"):
            asyncio.run(run(ids))


def test_a_call_that_fails_is_the_error_of_its_requests_and_the_next_one_works() -> None:
    engine = Engine({"r": [[1]]})

    async def run() -> list:
        of = fetched(engine)
        await of.start()
        with pytest.raises(WorkerError, match="fetching logprobs failed: 'lost'"):
            await of.of("lost", outputs([1]))
        return await of.of("r", outputs([1]))

    assert asyncio.run(run())[0].tolist() == [-1.0]


def test_an_engine_that_cannot_keep_them_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    of = fetched(Engine({}, "speculative decoding draws several tokens in a step"))
    asyncio.run(of.start())
    assert of.source == "vllm" and of.arguments("r") == {"logprobs": 0}
    assert [record.getMessage() for record in caplog.records] == [
        "sampler 0: vLLM returns logprobs token by token, which is slower: speculative decoding draws several tokens "
        "in a step"
    ]
