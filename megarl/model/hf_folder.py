"""A Hugging Face folder: its config and its safetensors, read lazily, tensor by tensor, slice by slice."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megarl.errors import ModelError, nearest
from megarl.model.sharding import ShardedTensor
from megarl.parallel.groups import Groups


def read_config(path: str | Path) -> dict[str, Any]:
    """Parsed ``config.json``.

    Raises:
        ModelError: missing or not JSON.
    """
    file = Path(path).expanduser() / "config.json"
    try:
        return json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{file} does not exist; give a Hugging Face folder") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error


# Which file holds which tensor, where there are several.
INDEX = "model.safetensors.index.json"


class WeightFolder:
    """The safetensors of a folder, opened on first use."""

    def __init__(self, path: str | Path) -> None:
        """Index the folder.

        Raises:
            ModelError: no safetensors, or an index that names a missing file.
        """
        self.path = Path(path).expanduser()
        self._files: dict[Path, Any] = {}
        self.where = self._index()

    def _index(self) -> dict[str, Path]:
        index = self.path / INDEX
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ModelError(f"{index} has no valid weight_map: {error!r}") from error
            missing = sorted({name for name in weight_map.values() if not (self.path / name).is_file()})
            if missing:
                raise ModelError(f"{index} names {missing[0]}, which is not in the folder; download the model again")
            return {name: self.path / file for name, file in weight_map.items()}
        single = self.path / "model.safetensors"
        if not single.is_file():
            raise ModelError(f"{self.path} holds neither model.safetensors nor {INDEX}")
        return dict.fromkeys(self._open(single).keys(), single)

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read ({error}); it is truncated or damaged") from error
        return self._files[file]

    def get_slice(self, name: str) -> Any:
        """A tensor of the folder, unread; see ``sharding.Sliceable``.

        Raises:
            ModelError: it is absent.
        """
        if name not in self.where:
            raise ModelError(f"{self.path} lacks the tensor '{name}'{nearest(name, self.where)}")
        return self._open(self.where[name]).get_slice(name)

    def load(self, tensors: Iterable[ShardedTensor], groups: Groups) -> set[str]:
        """Fill the tensors, each rank reading only its own slices; returns the names used.

        Raises:
            ModelError: a tensor is absent or has another shape.
        """
        used = set()
        for tensor in tensors:
            source = self.get_slice(tensor.name)
            if tuple(source.get_shape()) != tensor.shape:
                raise ModelError(
                    f"'{tensor.name}' in {self.path} has shape {source.get_shape()}, config.json implies "
                    f"{list(tensor.shape)}"
                )
            tensor.load(source, groups)
            used.add(tensor.name)
        return used
