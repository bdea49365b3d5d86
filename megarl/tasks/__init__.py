# SPDX-License-Identifier: Apache-2.0
"""Register tasks, which are prompts with verifiable rewards. A new task is a module and a line in ``TASKS``."""

from collections.abc import Callable

from megarl.errors import ConfigError
from megarl.plugins import pick_or_load
from megarl.tasks import arithmetic, countdown, gsm8k, jsonl, reasoning_gym
from megarl.tasks.base import Reward, Task, TaskContext, is_environment
from megarl.tasks.rewards.custom_reward import RewardedTask, load_reward

__all__ = ["TASKS", "Reward", "Task", "TaskContext", "build_task"]

# Name in ``task.name`` -> factory, which raises ConfigError for wrong options and DataError for wrong data.
TASKS: dict[str, Callable[[TaskContext], Task]] = {
    "arithmetic": arithmetic.build,
    "countdown": countdown.build,
    "gsm8k": gsm8k.build,
    "jsonl": jsonl.build,
    "reasoning_gym": reasoning_gym.build,
}
# Name -> where its factory is. They are loaded like a user's own.
ENVIRONMENTS = {
    "calculator": "megarl.environments.calculator:build",
    "guessing": "megarl.environments.guessing:build",
    "verifiers": "megarl.environments.verifiers.environment:build",
}


def build_task(context: TaskContext) -> Task:
    """Build the task that ``task.name`` names, with the reward of ``task.reward`` if that is set.

    The name is that of a registered task, or ``file.py:build``.

    Raises:
        ConfigError: unknown task, wrong options, missing file or reward function.
        DataError: malformed rows; the message counts all of them and lists the first few.
    """
    name = context.config.name
    known = TASKS | dict.fromkeys(ENVIRONMENTS)
    task = pick_or_load(known, ENVIRONMENTS.get(name, name), "task", "task.name", context.recipe_dir)(context)
    if len(task) == 0:
        raise ConfigError(f"task '{name}' has no prompts; check task.path and task.options")
    if is_environment(task):
        if context.config.reward is not None:
            raise ConfigError(
                f"task.reward is '{context.config.reward}', but task '{name}' is an environment, which gives the "
                "reward of its episodes itself; remove it"
            )
        return task
    if context.config.reward is None:
        if context.config.reward_weights:
            raise ConfigError("task.reward_weights is set, but task.reward is not; remove it, or name the function")
        return task
    function = load_reward(context, context.config.reward)
    return RewardedTask(task, context.config.reward, function, context.config.reward_weights)
