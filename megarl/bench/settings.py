# SPDX-License-Identifier: Apache-2.0
"""Define the settings of `megarl bench`. Imports neither torch nor transformers, so that a typo is reported at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError, model_validator

from megarl.bench.shapes import SHAPES
from megarl.config import ModelConfig, ParallelConfig, TrainConfig, TrainerConfig
from megarl.config.base import Section
from megarl.config.checks import check_engine_fits_model, check_trainer, read_model_shape
from megarl.config.cross_sections import check_layout, check_switches
from megarl.config.explain import explain
from megarl.config.sections.lora import LoraConfig
from megarl.config.sections.sampler import EngineParallel
from megarl.errors import ConfigError, UnsupportedError, nearest
from megarl.families import family_of
from megarl.hub import local_model

Contender = Literal["te", "local", "full", "peft"]
# Micro-batches of a step for each pipeline stage: enough that the stages seldom wait for each other.
FILLS_PIPELINE = 4


class Measured(Section):
    """The settings that all benches have."""

    model: str
    """A named shape with random weights, or a Hugging Face folder."""
    layers: int | None = Field(None, ge=1)
    """Shorten a named shape to this many layers. Default: all."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of weights and activations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` uses CUDA if torch sees a GPU."""
    seed: int = Field(0, ge=0)
    """Seed of weights and tokens."""


class BenchSettings(Measured, ParallelConfig):
    """The settings of `bench train`: those below, and the layout of megarl's contenders, as in ``parallel``."""

    contenders: list[Contender] = Field(["te", "local", "full", "peft"], min_length=1)
    """``te`` and ``local``: LoRA in megarl on that back end. ``full``: megarl with all weights trained, on ``te`` if it
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
    """``train.compile`` of megarl's contenders. ``te`` is left out, since it cannot be compiled; ``full`` is
    ``local``."""
    recompute: Literal["none", "selective", "full"] = "none"
    """``train.recompute`` of megarl's contenders. ``peft`` checkpoints its layers with ``full``."""
    recompute_layers: int | None = Field(None, ge=1)
    """``train.recompute_layers`` of megarl's contenders."""

    @property
    def layout(self) -> ParallelConfig:
        """The layout alone."""
        return ParallelConfig(**self.model_dump(include=set(ParallelConfig.model_fields)))

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


class SyncBenchSettings(Measured):
    contents: list[Literal["adapter", "merged"]] = Field(["adapter", "merged"], min_length=1)
    """What a sync sends; each is measured with engines of its own. The base that comes first is measured too."""
    transport: str = "auto"
    """``checkpoint_engine.transport``. ``auto``: ``ipc`` if trainer and engine share the device, else ``nccl``."""
    engines: int = Field(1, ge=1)
    """Number of engines. Each gets GPUs of its own if there are enough beside GPU 0, which the trainer uses. Otherwise
    all engines use the first GPUs, the trainer's among them."""
    tensor: int = Field(1, ge=1)
    """``sampler.parallel.tensor``: ranks, and GPUs, of each engine."""
    r: int = Field(32, ge=1)
    """Rank of the adapter, on all linears."""
    rounds: int = Field(20, ge=2)
    """Timed syncs of each kind; their median is reported."""
    bucket_mib: int = Field(256, ge=1)
    """``checkpoint_engine.bucket_mib``."""
    kv_cache_gib: float = Field(2.0, gt=0.0)
    """``sampler.kv_cache_gib``."""
    choose: bool = False
    """Also measure what each content costs while sampling, and say which pays. The engines then use CUDA graphs."""
    concurrency: int = Field(256, ge=8, multiple_of=8)
    """With ``choose``: completions that are asked for at once, 8 of each prompt."""
    response_tokens: int = Field(128, ge=1)
    """With ``choose``: tokens of a completion."""
    disk: bool = True
    """Measure vLLM's own way too: save the adapter to memory-backed files, load them into a running engine."""


class RolloutBenchSettings(Measured):
    contents: list[Literal["adapter", "merged"]] = Field(["adapter", "merged"], min_length=1)
    """Engines to measure: ``adapter`` has LoRA and samples with an adapter and from the base;
    ``merged`` has none, as ``checkpoint_engine.content`` says."""
    plain: list[Literal["adapter", "merged"]] = Field(["adapter"])
    """Engines of ``vllm.LLM`` to measure beside them, without anything of megarl."""
    concurrency: list[int] = Field([32, 128, 512], min_length=1)
    """Numbers of completions that are asked for at once; each a multiple of ``samples``."""
    samples: int = Field(8, ge=2)
    """Completions of each prompt."""
    prompt_tokens: int = Field(128, ge=1)
    """Tokens of a prompt."""
    response_tokens: int = Field(256, ge=1)
    """Most tokens of a completion; those of a named shape have as many."""
    r: int = Field(16, ge=1)
    """Rank of the adapter, on all linears."""
    rounds: int = Field(2, ge=1)
    """Timed rounds at each concurrency, after a call that is not timed."""
    kv_cache_gib: float = Field(24.0, gt=0.0)
    """``sampler.kv_cache_gib``."""

    @model_validator(mode="after")
    def _whole_prompts(self) -> Self:
        for one in self.concurrency:
            if one < self.samples or one % self.samples:
                raise ValueError(f"concurrency {one} must be a multiple of samples ({self.samples})")
        return self


S = TypeVar("S", BenchSettings, SyncBenchSettings, RolloutBenchSettings)
# What fits the smallest shape, on a CPU.
TINY_ROLLOUT = {
    "concurrency": [4, 16], "samples": 4, "prompt_tokens": 16, "response_tokens": 16, "kv_cache_gib": 0.1
}  # fmt: skip


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
    settings = _parse(BenchSettings, model, batch, overrides)
    check_layout(settings.layout)
    check_switches(settings.train)
    config = TrainerConfig(
        ModelConfig(path=settings.model, dtype=settings.dtype),
        settings.layout,
        LoraConfig(lora_dropout=settings.dropout),
        settings.train,
    )
    check_trainer(config, model_config(settings.model, settings.layers))
    return settings


def parse_sync_settings(model: str, overrides: Sequence[str] = ()) -> SyncBenchSettings:
    """Parse the settings of `bench sync`; arguments and errors as ``parse_settings``."""
    settings = _parse(SyncBenchSettings, model, {}, overrides)
    check_engine_fits_model(EngineParallel(tensor=settings.tensor), model_config(settings.model, settings.layers))
    return settings


def parse_rollout_settings(model: str, overrides: Sequence[str] = ()) -> RolloutBenchSettings:
    """Parse the settings of `bench rollout`; arguments and errors as ``parse_settings``.

    Raises:
        UnsupportedError: the model is a mixture of experts.
    """
    settings = _parse(RolloutBenchSettings, model, dict(TINY_ROLLOUT) if model == "tiny" else {}, overrides)
    if family_of(model_config(settings.model)).moe:
        raise UnsupportedError(f"bench rollout: '{model}' is a mixture of experts; dense models can be measured")
    return settings


def _parse(kind: type[S], model: str, defaults: dict[str, Any], overrides: Sequence[str]) -> S:
    tree: dict[str, Any] = {"model": model if model in SHAPES else local_model(model)} | defaults
    try:
        given: Any = OmegaConf.to_container(OmegaConf.from_dotlist([_checked(override) for override in overrides]))
        tree |= given
        settings = kind.model_validate(tree)
    except OmegaConfBaseException as error:
        raise ConfigError(f"bench: {str(error).splitlines()[0]}") from error
    except ValidationError as error:
        raise ConfigError(explain(error, tree, kind)) from None
    model_config(settings.model, settings.layers)
    return settings


def _checked(override: str) -> str:
    key, equals, value = override.partition("=")
    if not equals or not key or not value:
        raise ConfigError(f"override '{override}' must have the form key=value")
    return override


def model_config(model: str, layers: int | None = None) -> dict[str, Any]:
    """Return the model's config.json, of a named shape or from its folder.

    Args:
        model: a named shape or a folder.
        layers: number of layers that a named shape is shortened to; None: all.

    Raises:
        ConfigError: the model is neither a named shape nor a Hugging Face folder; or it has no ``layers`` to leave out.
    """
    if model in SHAPES:
        config = SHAPES[model].config()
        if layers is not None and layers > config["num_hidden_layers"]:
            raise ConfigError(f"layers is {layers}, but '{model}' has {config['num_hidden_layers']}; use fewer")
        return config | ({} if layers is None else {"num_hidden_layers": layers})
    if layers is not None:
        raise ConfigError(f"layers is {layers}, but '{model}' is a folder; only named shapes can be shortened")
    try:
        return read_model_shape(model)
    except ConfigError as error:
        known = ", ".join(SHAPES)
        raise ConfigError(f"{error} or a named shape{nearest(Path(model).name, SHAPES)} (known: {known})") from None
