# SPDX-License-Identifier: Apache-2.0
"""Test the parts of a compiled layer: attention and dropout as operators, the count of compilations, the clock."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from megarl.errors import UnsupportedError
from megarl.lora.layers import dropout as dropping
from megarl.lora.layers.dropout import drop_inputs, dropout
from megarl.lora.layers.products import Layout
from megarl.lora.layers.traced_linear import adapted_linear, numbers_of
from megarl.model.layers.attention.core import PackedSequences, attend_runs
from megarl.model.layers.attention.traced_attention import attend
from megarl.model.layers.traced.kept import joined, parted
from megarl.model.step import compiled
from megarl.model.step.pass_clock import PassClock
from megarl.model.weights.fusion import HeadLayout

CPU = torch.device("cpu")


def inputs(packed: PackedSequences, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return query, key and value of 4 heads in 2 groups, whose heads have 6 features, values 5."""
    torch.manual_seed(0)
    keys = sum(packed.key_lengths)
    shapes = (sum(packed.query_lengths), 4, 6), (keys, 2, 6), (keys, 2, 5)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("lengths", "context"), [((3, 1, 7), 1), ((4, 8), 2)])
def test_attention_as_an_operator_equals_sdpa_with_its_gradients(lengths, context, window):
    packed = PackedSequences.from_lengths(lengths, CPU, context=context, context_rank=context - 1)
    mine, theirs = inputs(packed), inputs(packed)
    out = attend(*mine, packed.traced.host_bounds, 0.3, window or 0)
    expected = attend_runs(*theirs, packed, 0.3, window)
    slope = torch.randn_like(expected)
    gradients, wanted = torch.autograd.grad(out, mine, slope), torch.autograd.grad(expected, theirs, slope)
    for actual, true in zip([out, *gradients], [expected, *wanted], strict=True):
        torch.testing.assert_close(actual, true)


def test_the_operators_are_sound():
    packed = PackedSequences.from_lengths((3, 1, 4), CPU)
    opcheck(attend.overload, (*inputs(packed), packed.traced.host_bounds, 0.3, 2))
    hidden, heads = torch.randn(8, 1, 6, requires_grad=True), HeadLayout(1, 2, 4)
    layout = Layout((0, 2), (3, 2), (0.5, 2.0), "qkv", heads)
    matrices = [torch.randn(rows, rank, requires_grad=True) for rows, rank in ((8, 3), (4, 2))]
    given = torch.randn(16, 6), torch.randn(5, 6, requires_grad=True), matrices, *numbers_of(layout)
    for states in (hidden, hidden.detach()):
        opcheck(adapted_linear.overload, (states, *given))
    # Two calls draw different masks, so results cannot be compared.
    opcheck(
        dropout.overload,
        (hidden, 0.5, False, 0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_gradients_that_follow_each_other_are_joined_without_a_copy():
    memory = torch.arange(20.0)
    first, second, third = memory[:6].view(3, 2), memory[6:12].view(2, 3), memory[12:].view(2, 4)
    flat = joined([first, None, second, third])
    assert torch.equal(flat, memory) and flat.data_ptr() == memory.data_ptr()
    for others in ([first, third, second], [first, second.clone(), third], [first, second.t(), third]):
        flat = joined(others)
        assert torch.equal(flat, torch.cat([other.flatten() for other in others]))
        assert flat.data_ptr() != memory.data_ptr()
        for piece, other in zip(parted(flat, others), others, strict=True):
            assert torch.equal(piece, other)


@pytest.mark.parametrize(("ranks", "splits", "own"), [(1, True, False), (2, True, True), (2, False, False)])
def test_a_single_rank_draws_from_the_default_generator_alone(monkeypatch, ranks, splits, own):
    entered = []

    @contextlib.contextmanager
    def fork():
        entered.append(True)
        yield

    monkeypatch.setattr(dropping, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=fork))
    group, base = SimpleNamespace(size=lambda: ranks), SimpleNamespace(sequence_parallel=False)
    layer = SimpleNamespace(training=True, splits_inputs=splits, base_layer=base, group=group)
    dropped = drop_inputs(layer, 0.5, torch.ones(64))
    assert bool(entered) is own and 0 < int((dropped == 0).sum()) < 64


def test_compiled_dropout_drops_what_uncompiled_does():
    def run(hidden: torch.Tensor) -> torch.Tensor:
        return dropout(hidden, 0.4, False, 0)[0] + dropout(hidden, 0.4, False, 1)[0]

    def plain(hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(hidden, 0.4) + F.dropout(hidden, 0.4)

    hidden, results = torch.randn(32, 1, 48, requires_grad=True), []
    for function in (torch.compile(run, backend="aot_eager", fullgraph=True), plain):
        torch.manual_seed(3)
        out = function(hidden)
        results += [out, *torch.autograd.grad(out.square().sum(), hidden), torch.rand(1)]
    for actual, expected in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(actual, expected)


def test_late_compilations_are_counted_and_warned_of(caplog):
    count = compiled.CompilationCount()
    function = torch.compile(lambda tensor: tensor + 1, backend="aot_eager", dynamic=False)
    for size, expected in ((2, 1), (2, 0), (3, 1), (3, 0)):
        function(torch.ones(size))
        assert count.read() == expected
    [warning] = [record for record in caplog.records if record.name == compiled.__name__]
    assert "compiled 1 graphs in update 3" in warning.getMessage()


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"train\.compile is true.*install g\+\+"):
        compiled.compile_layers([], CPU)


def test_only_passes_of_an_update_are_timed():
    clock = PassClock(CPU)
    for running in (False, True):
        clock.running = running
        for name in ("forward-compute", "backward-compute", "all-grads-sync"):
            timer = clock(name, log_level=2)
            timer.start(barrier=False)
            time.sleep(0.01)
            timer.stop()
    seconds = clock.read()
    assert seconds.keys() == {"forward_seconds", "backward_seconds"}
    assert all(0.01 <= value < 0.02 + 1.0 for value in seconds.values())
    assert clock.read() == {"forward_seconds": 0, "backward_seconds": 0}
