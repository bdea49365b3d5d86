# SPDX-License-Identifier: Apache-2.0
"""Define the config tree: pydantic models, a file each in ``sections``. Importing this loads neither torch nor vLLM."""

from megarl.config.checks import check_run
from megarl.config.engine import EngineConfig
from megarl.config.load import dump_config, load_config, override_config, parse_config
from megarl.config.run import RunConfig
from megarl.config.sections.checkpoint_engine import CheckpointEngineConfig
from megarl.config.sections.eval import EvalConfig, EvalTaskConfig
from megarl.config.sections.lora import LoraConfig
from megarl.config.sections.loss import LossConfig
from megarl.config.sections.model import ModelConfig
from megarl.config.sections.parallel import ParallelConfig
from megarl.config.sections.sampler import EngineParallel, SamplerConfig
from megarl.config.sections.task import TaskConfig
from megarl.config.sections.train import TrainConfig
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
