# SPDX-License-Identifier: Apache-2.0
"""Config section ``task``: the prompts and the reward to train on."""

from typing import Any, Literal

from pydantic import Field

from megarl.config.base import Section


class TaskConfig(Section):
    name: str
    """A registered task, or ``file.py:build``: a function that takes a ``megarl.tasks.TaskContext`` and returns a
    ``megarl.tasks.Task``. The path is relative to the recipe."""
    path: str | None = None
    """Data, for tasks that read rows: a ``.jsonl``, ``.parquet`` or ``.csv`` file. ``jsonl`` also takes a folder
    written by ``datasets.save_to_disk`` and the id of a data set on the Hugging Face hub. Relative to the recipe."""
    reward: str | None = None
    """``file.py:function`` or ``package.module:function`` that replaces the task's own reward. The path is relative to
    the recipe. The name of its second parameter says what it is given: ``response`` (text), ``completion`` (text,
    finish reason, token ids), ``responses`` or ``completions`` (all of one prompt); it may be ``async def``."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each component, where ``task.reward`` returns a dictionary of components (``{correct: 1.0, format:
    0.2}``): the score is the weighted sum."""
    reward_dry_run: bool = True
    """Call the reward once at the start, with the first prompt and a response of plain text: what it raises ends the
    run before trainer and sampler are started. Its value is only checked to be one, and is used nowhere."""
    reward_threads: int = Field(16, ge=1)
    """Most calls of the reward at the same time, each in a thread, or in one event loop if the reward is async. 1: one
    after the other in the main thread, for a reward that is not thread-safe or that uses signals."""
    reward_seconds: float = Field(600.0, gt=0.0)
    """Limit of one call of the reward, seconds. A call that takes longer ends the run."""
    reward_processes: int = Field(1, ge=1, le=1024)
    """Processes that compute rewards, each with ``reward_threads`` calls at a time and a state of its own. More than 1:
    for verifiers that keep a core busy."""
    reward_retries: int = Field(0, ge=0, le=100)
    """How often a call of the reward that raised, crashed or exceeded ``reward_seconds`` is tried again."""
    max_turns: int = Field(16, ge=1)
    """For an environment: most turns of an episode."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """For an environment: most tokens of a turn. Default: what is left of ``sampler.max_response_tokens``, which counts
    all tokens of an episode after the prompt, those of tools and users included."""
    episode_seconds: float = Field(600.0, gt=0.0)
    """For an environment: limit of an episode, seconds; sampling and its waiting included. An episode that takes longer
    ends with what has been drawn and a reward of 0. One whose code keeps the process busy ends the run."""
    reward_errors: Literal["raise", "zero"] = "raise"
    """What becomes of a reward that raises, crashes or exceeds ``reward_seconds``, after its retries, and of an episode
    in which the environment raises. ``raise``: it ends the run; ``zero``: the reward is 0, and ``failed_rewards`` in
    the metrics counts it. A process that hangs is replaced."""
    system_prompt: str | None = None
    """System message put before every question."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the model's chat template (``{enable_thinking: false}``)."""
    long_prompts: Literal["refuse", "drop"] = "refuse"
    """Prompts longer than ``sampler.max_prompt_tokens``. ``refuse``: an error before anything starts; ``drop``: leave
    them out. Their number is said on the screen and in ``summary.json``. Every prompt is then encoded at the start."""
    held_out: int = Field(0, ge=0, le=1_000_000)
    """Number of prompts, the task's last, that are never trained on. They are the evaluation set ``held_out``; see
    ``eval.tasks``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings. Each task documents and checks them."""
