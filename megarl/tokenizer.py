# SPDX-License-Identifier: Apache-2.0
"""Load a model's tokenizer."""

from typing import Any

from megarl.errors import ModelError


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer of a Hugging Face folder.

    Raises:
        ModelError: the folder holds none that transformers can load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers may raise anything on unexpected files
        raise ModelError(f"model.path '{path}' holds no tokenizer that transformers can load: {error}") from error
