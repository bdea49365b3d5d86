# SPDX-License-Identifier: Apache-2.0
"""Define the config tree: pydantic models, one section per file. Importing this loads neither torch nor vLLM."""

from megarl.config.checkpoint_engine import CheckpointEngineConfig
from megarl.config.checks import check_run
from megarl.config.engine import EngineConfig
from megarl.config.eval import EvalConfig, EvalTaskConfig
from megarl.config.load import dump_config, load_config, override_config, parse_config
from megarl.config.lora import LoraConfig
from megarl.config.loss import LossConfig
from megarl.config.model import ModelConfig
from megarl.config.parallel import ParallelConfig
from megarl.config.run import RunConfig
from megarl.config.sampler import EngineParallel, SamplerConfig
from megarl.config.task import TaskConfig
from megarl.config.train import TrainConfig
from megarl.config.trainer import TrainerConfig

__all__ = [
    "CheckpointEngineConfig",
    "EngineConfig",
    "EngineParallel",
    "EvalConfig",
    "EvalTaskConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "ParallelConfig",
    "RunConfig",
    "SamplerConfig",
    "TaskConfig",
    "TrainConfig",
    "TrainerConfig",
    "check_run",
    "dump_config",
    "load_config",
    "override_config",
    "parse_config",
]
