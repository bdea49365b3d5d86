# SPDX-License-Identifier: Apache-2.0
"""Test the lines below the table of `megarl bench sync`."""

from megarl.bench.syncing.report import sync_table

SETTINGS = {"model": "tiny", "layers": None, "data": 1, "tensor": 1, "r": 24, "dtype": "float32", "engines": 1}


def test_what_was_measured_is_told_though_vllms_own_way_failed() -> None:
    row = {"kind": "adapter", "tensors": 2, "nbytes": 2**20, "ms": 2.0, "worst_ms": 3.0, "stages_ms": {}}
    report = {"settings": SETTINGS, "transport": "ipc", "ceilings": {"copy": 10.0}, "rows": [row]}
    failed = sync_table(report | {"disk_error": "the plain vLLM engine ended with status 1"})
    assert "vLLM's own way (save and load) failed: the plain vLLM engine ended with status 1" in failed
    assert "adapter" in failed and "2.00" in failed
    timed = sync_table(report | {"disk": {"save_ms": 30.0, "load_ms": 50.0, "start_seconds": 5.0}})
    assert "a sync of the adapter is 40 times as fast as save and load" in timed and "failed" not in timed


def test_checkpoint_engine_is_compared_with_the_rows_of_full_weights() -> None:
    row = {"tensors": 2, "nbytes": 2**30, "worst_ms": 60.0, "stages_ms": {}, "ms": 50.0}
    rows = [row | {"kind": kind} for kind in ("first base", "base", "adapter", "merged")]
    report = {"settings": SETTINGS, "transport": "nccl", "ceilings": {"copy": 10.0}, "rows": rows}
    peer = {"version": "0.4.2", "nbytes": 2**30, "register_ms": 2000.0, "update_ms": 500.0}
    lines = sync_table(report | {"moonshot": peer}).splitlines()
    assert "checkpoint-engine 0.4.2, 1,024 MiB, 1 engine: register 2000 + update 500 ms" in lines
    compared = [line for line in lines if "as fast as register" in line]
    assert compared == [
        f"a sync of {kind} is 50 times as fast as register and update, 10 times as fast as update alone"
        for kind in ("base", "merged")
    ]
    assert "checkpoint-engine failed: no memory" in sync_table(report | {"moonshot_error": "no memory"})
