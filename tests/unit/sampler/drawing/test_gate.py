# SPDX-License-Identifier: Apache-2.0
"""Check that the gate answers from one verified version or not at all."""

from contextlib import ExitStack

import pytest

from megarl.checkpoint_engine.records import Receipt
from megarl.checkpoint_engine.wire import Kind
from megarl.errors import StaleVersionError, WeightSyncError
from megarl.sampler.drawing.gate import VersionGate


def sync(gate: VersionGate, version: int, kind: Kind = "adapter", checksum: str = "c") -> None:
    gate.stage([Receipt(version, kind, 0, 1, 1, checksum)])
    gate.check_flip(version, kind, checksum)
    gate.flip()


def use(gate: VersionGate, version: int) -> None:
    with gate.request(version):
        pass


def test_only_the_resident_version_is_answered() -> None:
    gate = VersionGate(base_ready=True)
    with pytest.raises(StaleVersionError, match="holds none yet"):
        use(gate, 0)
    sync(gate, 0)
    use(gate, 0)
    sync(gate, 1)
    for stale in (0, 2):
        with pytest.raises(
            StaleVersionError, match=f"asked for policy version {stale}, but the sampler holds version 1"
        ):
            use(gate, stale)


def test_weights_whose_receipts_the_trainer_gets_are_armed_by_version_and_kind_alone() -> None:
    gate = VersionGate(base_ready=True)
    gate.arm(4, "adapter", [])
    for version, kind in ((5, "adapter"), (4, "base")):
        with pytest.raises(WeightSyncError, match="but staged is"):
            gate.check_flip(version, kind, "c")
    gate.check_flip(4, "adapter", "c")
    gate.flip()
    use(gate, 4)
    gate.arm(5, "adapter", [Receipt(5, "adapter", 0, 1, 1, "c")])
    with pytest.raises(WeightSyncError, match="but staged is"):
        gate.check_flip(5, "adapter", "d")


def test_staging_alone_changes_nothing() -> None:
    gate = VersionGate(base_ready=True)
    sync(gate, 0)
    gate.stage([Receipt(1, "adapter", 0, 1, 1, "c")])
    use(gate, 0)
    with pytest.raises(StaleVersionError):
        use(gate, 1)


@pytest.mark.parametrize(("version", "kind", "checksum"), [(2, "adapter", "c"), (1, "base", "c"), (1, "adapter", "d")])
def test_only_what_is_staged_can_be_flipped(version: int, kind: Kind, checksum: str) -> None:
    gate = VersionGate(base_ready=True)
    gate.stage([Receipt(1, "adapter", 0, 1, 1, "c")])
    with pytest.raises(WeightSyncError, match="but staged is"):
        gate.check_flip(version, kind, checksum)


def test_workers_that_received_different_weights_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="different weights"):
        VersionGate(True).stage([Receipt(1, "adapter", 0, 1, 1, "c"), Receipt(1, "adapter", 1, 1, 1, "d")])


def test_a_new_base_needs_an_idle_engine_and_a_new_adapter() -> None:
    gate = VersionGate(base_ready=False)
    gate.stage([Receipt(0, "adapter", 0, 1, 1, "c")])
    with pytest.raises(WeightSyncError, match="before the base weights"):
        gate.check_flip(0, "adapter", "c")
    sync(gate, 0, "base")
    sync(gate, 0)
    with gate.request(0):
        with pytest.raises(WeightSyncError, match="1 requests run"):
            gate.overwrite("base")
    gate.overwrite("base")
    with pytest.raises(StaleVersionError):
        use(gate, 0)


def test_merged_weights_need_their_base_and_an_idle_engine_and_end_the_version_before() -> None:
    gate = VersionGate(base_ready=False, content="merged")
    gate.stage([Receipt(0, "merged", 0, 1, 1, "c")])
    with pytest.raises(WeightSyncError, match="merged version 0 came before the base weights"):
        gate.check_flip(0, "merged", "c")
    sync(gate, 0, "base")
    gate.overwrite("merged")
    sync(gate, 0, "merged")
    with gate.request(0):
        with pytest.raises(WeightSyncError, match="merged weights came while 1 requests run"):
            gate.overwrite("merged")
    gate.overwrite("merged")
    with pytest.raises(StaleVersionError, match="holds none yet"):  # half-written
        use(gate, 0)
    sync(gate, 1, "merged")  # the base is still there
    use(gate, 1)
    assert gate.retire_idle() == []


def test_an_engine_that_read_its_base_from_disk_needs_no_other_after_a_readmission() -> None:
    gate = VersionGate(base_ready=True)
    sync(gate, 3)
    gate.refuse("a sync failed")
    renewed = gate.renewed()
    with pytest.raises(StaleVersionError, match="holds none yet"):
        use(renewed, 3)
    sync(renewed, 4)
    use(renewed, 4)


@pytest.mark.parametrize("complete", [False, True])
def test_an_engine_whose_base_was_overwritten_needs_it_anew_after_a_readmission(complete: bool) -> None:
    gate = VersionGate(base_ready=True)
    gate.overwrite("base")
    if complete:
        sync(gate, 3, "base")
        gate = gate.renewed()
    for renewed in (gate.renewed(), VersionGate(base_ready=False).renewed()):
        with pytest.raises(WeightSyncError, match="before the base weights"):
            sync(renewed, 4)


@pytest.mark.parametrize(("content", "other"), [("merged", "adapter"), ("adapter", "merged")])
def test_only_the_content_that_the_engine_was_started_for_is_taken(content: Kind, other: Kind) -> None:
    gate = VersionGate(True, content)
    gate.check_kind("base")
    gate.check_kind(content)
    with pytest.raises(
        WeightSyncError, match=f"{other} weights came, .* started with checkpoint_engine.content={content}"
    ):
        gate.check_kind(other)


def test_a_refusal_is_final_and_reaches_running_requests() -> None:
    gate = VersionGate(base_ready=True)
    sync(gate, 0)
    with pytest.raises(WeightSyncError, match="first reason"), gate.request(0):
        gate.refuse("first reason")
        gate.refuse("second reason")
    with pytest.raises(WeightSyncError, match="first reason"):
        use(gate, 0)
    with pytest.raises(WeightSyncError, match="first reason"):
        sync(gate, 1)


def test_a_version_is_retired_only_when_no_request_uses_it() -> None:
    gate = VersionGate(base_ready=True)
    sync(gate, 0)
    with ExitStack() as running:
        running.enter_context(gate.request(0))
        sync(gate, 1)
        assert gate.retire_idle() == [0, 1]
    assert gate.retire_idle() == [1]
    assert gate.retire_idle() == [1]


def test_versions_in_use_leave_no_room_for_one_more_than_there_are_slots() -> None:
    gate = VersionGate(base_ready=True)
    sync(gate, 0)
    with gate.request(0):
        gate.make_room(1, slots=2)
        sync(gate, 1)
        assert gate.retire_idle() == [0, 1]
        with pytest.raises(WeightSyncError, match=r"2 would be live version 3 .* holds 2: version 0 \(1 requests"):
            gate.make_room(2, slots=2)
        gate.make_room(1, slots=2)  # the same version again takes no other slot
    assert gate.retire_idle() == [1]
    gate.make_room(2, slots=2)
