# SPDX-License-Identifier: Apache-2.0
"""Define the base of tasks whose prompts are the rows of a data set."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from megarl.config.base import Section
from megarl.tasks.base import Reward
from megarl.tasks.rows.files import RowModel
from megarl.types import Prompt

Options = TypeVar("Options", bound=Section)


class RowsTask(ABC, Generic[RowModel, Options]):
    """One prompt per row, in the order of the rows.

    Attributes:
        options: ``task.options``, validated.
    """

    def __init__(self, rows: Sequence[RowModel], options: Options, name: str) -> None:
        """
        Args:
            rows: the validated rows.
            options: ``task.options``, validated.
            name: prefix of the prompt ids (``"train"`` gives ``"train-17"`` for row 17, counted from 1).
        """
        self._rows, self.options, self._name = rows, options, name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of a {type(self).__name__} with {len(self)}")
        return self.prompt(f"{self._name}-{index + 1}", self._rows[index])

    @abstractmethod
    def prompt(self, name: str, row: RowModel) -> Prompt:
        """Build the prompt of one row; its id is ``name``."""

    @abstractmethod
    def reward(self, prompt: Prompt, response: str) -> Reward:
        """Score a response; see ``tasks.base.Task``."""
