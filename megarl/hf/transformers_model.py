# SPDX-License-Identifier: Apache-2.0
"""Build a model of transformers with adapters of PEFT on this rank, behind the interface of ``TrainedModel``."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from megarl import progress
from megarl.config import TrainerConfig
from megarl.config.back_ends import check_transformers
from megarl.hf.adapter import PeftAdapter
from megarl.hf.base_tensors import base_tensors
from megarl.hf.lengths import check_length, check_longest
from megarl.hf.load import add_adapters, load_causal
from megarl.hf.network import Network
from megarl.hf.optimizer import ReplicatedOptimizer
from megarl.hf.probe import probe
from megarl.hf.shards import shard_layers
from megarl.model.checkpoint.identity import identify
from megarl.model.layers.sequence_work import BY_TOKENS, SequenceWork, sequence_work
from megarl.model.step.micro_batch import MicroBatch
from megarl.model.step.stepper import Stepper
from megarl.model.trained_model import TrainedModel
from megarl.model.weights.sharded_tensor import ShardedTensor
from megarl.parallel.groups import Groups
from megarl.peft.spec import AdapterSpec


class TransformersModel(TrainedModel):
    """Any causal language model of transformers, with adapters of PEFT; see ``TrainedModel`` for its methods.

    Every data-parallel rank holds the whole adapter, and all of the base or, with ``train.shard_base``, a part of it.

    Attributes:
        hf_config: the model's config as a dictionary.
        network: the model on packs.
        peft_model: the model as PEFT has it.
    """

    def __init__(self, config: TrainerConfig, groups: Groups, adapters: Sequence[AdapterSpec]) -> None:
        """Load the base weights, put the adapters on, make their optimizers.

        Args:
            config: the trainer's settings, with ``model.backend`` "transformers".
            groups: process groups, from ``init_groups``.
            adapters: the adapters; the first one is active.

        Raises:
            AdapterError: PEFT refuses an adapter for this model.
            ConfigError: the longest sequence exceeds the model's positions.
            ModelError: the folder is incomplete or does not match its config.
            UnsupportedError: the model cannot be packed, or a setting is not supported.
        """
        check_transformers(config)
        causal = load_causal(config.model.path, getattr(torch, config.model.dtype))
        text = causal.config.get_text_config()
        self.hf_config = causal.config.to_dict() | text.to_dict()
        self._text_config = text
        check_longest(text, config)
        self.network = Network(causal)
        if config.train.shard_base and groups.topology.data > 1:
            shard_layers(self.network, groups.device)
        causal.to(groups.device)
        probe(self.network, groups.device)
        self.peft_model = add_adapters(causal, adapters)
        made = [
            PeftAdapter(spec.name, self.peft_model, trainable=spec.trainable, seed=config.train.seed)
            for spec in adapters
        ]
        optimizers = {
            one.name: ReplicatedOptimizer(one.parameters(), config.train, groups.data_context)
            for one in made
            if one.trainable
        }
        if config.train.recompute == "full":
            causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.peft_model.eval()
        self._switched = _switched(self.peft_model)
        super().__init__(
            config,
            groups,
            made,
            optimizers,
            _Stepper(self.network, config, groups),
            work=_work(self.hf_config),
            # Identified now, because the folder may be gone when the first checkpoint is saved.
            identity=identify(config.model.path) if groups.rank == 0 else {},
        )

    def _check_length(self, length: int, subject: str) -> None:
        check_length(self._text_config, length, subject)

    def _set_training(self, training: bool) -> None:
        for module in self._switched:
            module.training = training

    def _base_tensors(self, *, untied: bool = False) -> list[ShardedTensor]:
        return base_tensors(self.peft_model, self.config.model.path, untied=untied)

    def _base_parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.peft_model.parameters()


class _Stepper(Stepper):
    """Runs micro-batches one after the other; an output is the hidden states ``[T, H]``."""

    def __init__(self, network: Network, config: TrainerConfig, groups: Groups) -> None:
        super().__init__(groups, temperature=config.temperature, keep_logits_gib=config.train.keep_logits_gib)
        self._network = network

    def _run_items(self, items: list[MicroBatch], loss_function: Callable, *, forward_only: bool) -> list[dict]:
        records = []
        for item in items:
            progress.made()
            self.clock.start("forward")
            loss, _, record = loss_function(self._network.run(item), model=self._network, item=item)
            self.clock.stop("forward")
            if not forward_only:
                progress.made()
                self.clock.start("backward")
                loss.backward()
                self.clock.stop("backward")
            records.append(record)
        return records

    def _logprobs(self, model: Network, item: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = output.index_select(0, item.response_R)
        return model.logprobs(hidden, item.labels_R, self.temperature, self.keep_bytes)


def _switched(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return what training mode is for: dropout of adapters, and layers, which are recomputed in training mode only.

    All else stays in evaluation mode, since some models route at random or add noise in training mode.
    """
    dropouts = [one for layer in model.modules() if isinstance(layer, LoraLayer) for one in layer.lora_dropout.values()]
    return dropouts + [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]


def _work(hf_config: dict[str, Any]) -> SequenceWork:
    """Return the cost model of the config, or one that counts tokens if it has other keys."""
    try:
        return sequence_work(hf_config)
    except (KeyError, TypeError):
        return BY_TOKENS
