# SPDX-License-Identifier: Apache-2.0
"""Run what the tests of this folder need on another megatron-core: `python -m tests.newest.programs [FOLDER]`."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megarl.parallel import mcore
from megarl.verify.reference.reference_runs import make_truth, run_shared
from megarl.verify.run import verify_places
from tests.distributed import test_compile
from tests.distributed import test_latent_attention as latent
from tests.distributed import test_parity as parity
from tests.distributed.test_checkpoint import resume, save_and_go_on
from tests.helpers.cases import check, make_case, place
from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks

# They have between them every kind of layer and of schedule, every axis, mcore's own buffers and recomputation.
DENSE = ["TP2+SPxCP2", "PP2xVPP2xDP2+all"]
EXPERTS = ["TP2+SPxEP2xETP2xDP2", "EP2xDP4+all"]
LATENT = ["TP2xPP2xEP2"]
# Too long for CI.
MORE = (["TP2xPP2", "PP2+full"], ["TP2+SPxCP2", "PP2xVPP2xDP2+all"], ["CP2+selective"])
# It has attention, experts and keys of other ranks.
COMPILED = ["CPxEP"]
# Checkpoints with everything that could differ: family -> layout and dtype; in bf16 with dropout, hence random states.
SAVED: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3": ({"tensor": 2}, "bfloat16"),
    "mixtral": ({"data": 2, "expert": 2, "train": {"distributed_optimizer": True}}, "float32"),
}


def layouts(dense: list[str], experts: list[str], multi_latent: list[str]) -> None:
    """Verify a dense model, a mixture of experts and one with multi-latent attention."""
    with tempfile.TemporaryDirectory() as folder:
        cases = parity.make_cases(Path(folder), ["qwen3", "mixtral"])
        cases["v3"] = make_case(Path(folder), "v3", **latent.MODELS["v3"])
        run_shared(make_truth, [cases["v3"]])
        places = [place(cases["qwen3"], name, parity.LAYOUTS[name]) for name in dense]
        places += [place(cases["mixtral"], name, parity.LAYOUTS[name]) for name in experts]
        places += [place(cases["v3"], name, latent.LAYOUTS[name]) for name in multi_latent]
        check(verify_places(places))


def compiled() -> None:
    """Compare compiled layers with uncompiled ones."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "qwen3_moe", "qwen3_moe", tied=False, num_hidden_layers=2)
        test_compile.check(run_ranks(test_compile.compare, 2, folder, COMPILED), COMPILED)


def save(folder: str) -> None:
    """Train the models in FOLDER, save a checkpoint of each, train on; straight.pt holds the results."""
    for family, setup in SAVED.items():
        done = run_ranks(save_and_go_on, 2, f"{folder}/{family}", *setup)
        torch.save(done, Path(folder) / family / "straight.pt")


def load(folder: str) -> None:
    """Resume the checkpoints in FOLDER; resumed.pt holds the results."""
    for family, setup in SAVED.items():
        torch.save(run_ranks(resume, 2, f"{folder}/{family}", *setup), Path(folder) / family / "resumed.pt")


def main(folder: str | None = None) -> None:
    """Run all in one process; save in FOLDER/newest, resume those of FOLDER/installed; print the release.

    Without FOLDER, verify at the other layouts.
    """
    if folder is None:
        layouts(*MORE)
        return
    layouts(DENSE, EXPERTS, LATENT)
    compiled()
    save(f"{folder}/newest")
    load(f"{folder}/installed")
    print(f"megatron-core {mcore.release()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
