# SPDX-License-Identifier: Apache-2.0
"""Give a worker's errors to the engine as answers."""

import traceback
from typing import Any


class AnswerExtension:
    """Part of the extension of vLLM's ``Worker``, through which ``engine_link.call_workers`` calls all other methods.

    An error must not reach vLLM: of several workers it reads the answers up to the first error, and takes those that
    are left for the answers to its next call (0.26, 0.32).
    """

    def megarl_call(self, method: str, arguments: list[Any]) -> list[Any]:
        """Call another method; return True and its result, or False and its error's message."""
        try:
            return [True, getattr(self, method)(*arguments)]
        except Exception as error:
            traceback.print_exc()  # for the log
            return [False, str(error) or repr(error)]
