# SPDX-License-Identifier: Apache-2.0
"""Define the settings of `megarl bench train`."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from megarl.bench.settings import Measured, model_config, parse
from megarl.bench.shapes import SHAPES
from megarl.config import ModelConfig, ParallelConfig, TrainConfig, TrainerConfig
from megarl.config.checks import check_trainer
from megarl.config.cross_sections import check_layout, check_switches
from megarl.config.sections.lora import LoraConfig

Contender = Literal["te", "local", "bitwise", "full", "peft"]
# Micro-batches of a step for each pipeline stage: enough that the stages seldom wait for each other.
FILLS_PIPELINE = 4


class BenchSettings(Measured, ParallelConfig):
    """The settings of `bench train`: those below, and the layout of megarl's contenders, as in ``parallel``."""

    contenders: list[Contender] = Field(["te", "local", "full", "peft"], min_length=1)
    """``te`` and ``local``: LoRA in megarl on that back end. ``bitwise``: ``local`` with ``model.numerics: bitwise``;
    with ``local`` beside it the report says what that costs. ``full``: megarl with all weights trained, on ``te`` if it
    runs here, else on ``local``. ``peft``: Hugging Face + PEFT with SDPA, on one device whatever the layout."""
    one_rank: bool = True
    """At a layout of several ranks, measure each of megarl's contenders on one rank too."""
    sequences: int = Field(4, ge=1)
    """Number of sequences of a micro-batch."""
    micro_batches: int | None = Field(None, ge=1)
    """Micro-batches of a step on each data-parallel rank, so that the batch grows with ``data``. Default: 1, or 4 times
    ``pipeline`` if there are stages."""
    length: int = Field(512, ge=2)
    """Number of tokens fed of each sequence."""
    response: float = Field(1.0, gt=0.0, le=1.0)
    """Share of each sequence's tokens, at its end, that are trained on."""
    r: int = Field(16, ge=1)
    """Rank of the adapters, on all linears."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """``lora.lora_dropout`` of the adapters."""
    warmup: int = Field(2, ge=1)
    """Steps that are not timed."""
    steps: int = Field(5, ge=1)
    """Timed steps; their median is reported."""
    cuda_graphs: bool = False
    """``train.cuda_graphs`` of megarl's contenders."""
    compile: bool = False
    """``train.compile`` of megarl's contenders. ``full`` has megarl's layers then, not mcore's."""
    recompute: Literal["none", "selective", "full"] = "none"
    """``train.recompute`` of megarl's contenders. ``peft`` checkpoints its layers with ``full``."""
    recompute_layers: int | None = Field(None, ge=1)
    """``train.recompute_layers`` of megarl's contenders."""

    @property
    def layout(self) -> ParallelConfig:
        """The layout alone."""
        given = self.model_dump(include=set(ParallelConfig.model_fields), exclude_none=True)
        return ParallelConfig(**{"response_share": self.response} | given)

    @property
    def train(self) -> TrainConfig:
        """The ``train`` section of megarl's contenders."""
        chunks = 2 * self.context if self.context > 1 else 1
        return TrainConfig(
            device=self.device,
            seed=self.seed,
            micro_batch_tokens=self.sequences * -(-self.length // chunks) * chunks,
            cuda_graphs=self.cuda_graphs,
            compile=self.compile,
            recompute=self.recompute,
            recompute_layers=self.recompute_layers,
        )

    def trainer(self, model: ModelConfig) -> TrainerConfig:
        """The sections of megarl's contenders, with a ``model`` section."""
        return TrainerConfig(model, self.layout, LoraConfig(r=self.r, lora_dropout=self.dropout), self.train)

    @property
    def rounds(self) -> int:
        """Number of micro-batches of a step on each data-parallel rank."""
        return self.micro_batches or (FILLS_PIPELINE * self.pipeline if self.pipeline > 1 else 1)

    @property
    def batch(self) -> int:
        """Number of sequences of a step, over all ranks."""
        return self.sequences * self.rounds * self.data

    @property
    def tokens(self) -> int:
        """Number of tokens fed in a step, over all ranks."""
        return self.batch * self.length

    @property
    def response_tokens(self) -> int:
        """Number of tokens trained on in a step, over all ranks."""
        return self.batch * max(1, round(self.response * self.length))

    def alone(self) -> "BenchSettings":
        """Return the settings for one rank, with the batch of one data-parallel rank."""
        return self.model_copy(update=ParallelConfig().model_dump() | {"micro_batches": self.rounds})


def parse_settings(model: str, overrides: Sequence[str] = ()) -> BenchSettings:
    """Parse the settings of `bench train` for a named shape or a folder.

    Args:
        model: a key of ``SHAPES``, or a folder with a config.json, or a hub id.
        overrides: ``"key=value"`` strings, the value in YAML.

    Raises:
        ConfigError: a shape, key or value is unknown, or the layout does not fit the model.
        UnsupportedError: settings that megarl refuses together.
    """
    batch = {"sequences": SHAPES[model].sequences, "length": SHAPES[model].length} if model in SHAPES else {}
    settings = parse(BenchSettings, model, batch, overrides)
    check_layout(settings.layout)
    check_switches(settings.train)
    config = settings.trainer(ModelConfig(path=settings.model, dtype=settings.dtype))
    check_trainer(config, model_config(settings.model, settings.layers))
    return settings
