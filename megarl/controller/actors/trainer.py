# SPDX-License-Identifier: Apache-2.0
"""Run a trainer rank as a Ray actor."""

import os
import time
from importlib import import_module
from typing import Any

import numpy as np
import ray

from megarl.config import RunConfig
from megarl.config.back_ends import TRANSFORMERS
from megarl.controller.actors.adapters import build_trainer, check_start, load_start
from megarl.controller.actors.direct import AnswersInOrder, in_turn
from megarl.controller.actors.logs import logs_exceptions
from megarl.controller.actors.pulse import Participant
from megarl.network import LOOPBACK
from megarl.types import Sample


@logs_exceptions
class TrainerRank(AnswersInOrder):
    """One rank of the trainer. torch and mcore are imported here, never in the controller's process.

    Every method except ``rendezvous`` and ``sees`` is a collective: the controller calls it on all ranks with the same
    arguments. The calls of a sync come over a connection (``direct``), and take turns with the others.
    """

    def __init__(self, config: RunConfig, participant: Participant) -> None:
        super().__init__()
        participant.join()
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Ray may have started before the driver had all files
        began = time.perf_counter()
        # Takes seconds, which all ranks spend here at the same time.
        back_end = "hf.transformers_model" if config.model.backend == TRANSFORMERS else "model.megatron_model"
        import_module(f"megarl.{back_end}")
        self._import_seconds = time.perf_counter() - began
        self.config, self.rank = config, participant.index

    def rendezvous(self, alone: bool) -> tuple[str, int]:
        """Open the store at which all ranks meet; return its address and port. This rank keeps it open.

        Args:
            alone: True if all ranks are on this node; then only this node can reach the store.
        """
        from megarl.parallel.rendezvous import open_store

        address = LOOPBACK if alone else ray.util.get_node_ip_address()
        self._store = open_store(address)
        return address, self._store.port

    def place(self) -> Any:
        """Return where this rank computes, as ``choice.Sender``; not a collective."""
        return self.model.place()

    def ping(self) -> None:
        """Answer; not a collective."""

    def sees(self, path: str) -> bool:
        """Return True if a file or folder exists on this rank's node; not a collective."""
        return os.path.exists(path)

    def build(self, address: str, port: int, threads: int) -> dict[str, float]:
        """Join the group, build the model, load the base weights and the adapter.

        Args:
            address, port: result of rank 0's ``rendezvous``.
            threads: number of CPU threads of this rank.

        Returns:
            Seconds of ``imports``, ``groups`` (and the device) and ``model``.
        """
        began = time.perf_counter()
        from megarl.parallel.rendezvous import rank_environment

        os.environ.update(rank_environment(self.rank, self.config.parallel.world_size, address, port))
        import torch

        from megarl.controller.actors.updates import RankTrainer
        from megarl.loss import build_loss
        from megarl.parallel.device import pick_device
        from megarl.parallel.groups import init_groups

        torch.set_num_threads(threads)
        # Ray shows this actor only the GPUs assigned to it.
        device = pick_device(self.config.train.device)
        groups = init_groups(
            self.config.parallel, device, seed=self.config.train.seed, timeout_seconds=_longest_wait(self.config)
        )
        ready = time.perf_counter()
        self.model = build_trainer(self.config, groups)
        self._start = load_start(self.model, self.config)
        self.trainer = RankTrainer(self.model, build_loss(self.config.loss), self.config)
        built = time.perf_counter()
        return {"imports": self._import_seconds, "groups": ready - began, "model": built - ready}

    def lend_base(self) -> bytes:
        """See ``CheckpointEngineMixin``."""
        return self.model.lend_base()

    @in_turn
    def forward(self, samples: list[Sample], adapter: bool | str = True) -> list[np.ndarray]:
        """See ``RankTrainer``."""
        return self.trainer.forward(samples, adapter)

    @in_turn
    def forward_backward(self, samples: list[Sample], others: list[int], last: bool) -> None:
        """See ``RankTrainer``."""
        self.trainer.forward_backward(samples, others, last)

    @in_turn
    def optim_step(self, rate: float) -> dict[str, float]:
        """See ``RankTrainer``."""
        return self.trainer.optim_step(rate)

    @in_turn
    def save_checkpoint(self, path: str, extra: dict[str, Any]) -> None:
        """Call ``TrainedModel.save_checkpoint``, which returns once the state is copied."""
        self.model.save_checkpoint(path, extra | self._start)

    def finish_checkpoint(self) -> None:
        """Call ``TrainedModel.finish_checkpoint``; not a collective."""
        self.model.finish_checkpoint()

    @in_turn
    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Call ``TrainedModel.load_checkpoint`` and ``adapters.check_start``."""
        extra = self.model.load_checkpoint(path)
        check_start(extra, self._start, self.config)
        return extra

    @in_turn
    def save_adapter(self, path: str) -> None:
        """Write the adapter as a PEFT directory."""
        self.model.save_adapter(path, self.config.lora.save_experts)

    @in_turn
    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logprobs of all tokens but the first under the current policy, float32, at temperature 1."""
        sample = Sample(tokens, np.arange(len(tokens)) > 0)
        return self.model.forward(self.model.pack([sample]), temperature=1.0)[0]

    @in_turn
    def prepare_sync(self, *arguments: Any) -> bytes | None:
        """See ``CheckpointEngineMixin``."""
        return self.model.prepare_sync(*arguments)

    @in_turn
    def send_weights(self, *arguments: Any) -> Any:
        """See ``CheckpointEngineMixin``."""
        return self.model.send_weights(*arguments)

    @in_turn
    def finish_sync(self) -> None:
        """See ``CheckpointEngineMixin``."""
        self.model.finish_sync()

    def release_memory(self) -> None:
        """Give memory that no tensor uses back to this rank's GPU."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def without_gradient(self) -> list[str]:
        """See ``GradientRecord``; not a collective."""
        return self.model.optimizer.coverage.without_gradient()

    def never_with_gradient(self) -> tuple[int, list[str]]:
        """See ``GradientRecord.never``; not a collective."""
        return self.model.optimizer.coverage.never()

    def peak_device_gib(self) -> float:
        """Return the most memory that torch has held on this rank's GPU, GiB; 0 on a CPU."""
        import torch

        return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def _longest_wait(config: RunConfig) -> float:
    """Return the seconds that a rank may wait for another in a collective.

    This is a little longer than the controller's limits, since their errors say more.
    """
    train = config.train
    limits = (train.build_seconds, train.update_seconds, train.save_seconds, config.checkpoint_engine.timeout_seconds)
    return max(limits) + 60.0
