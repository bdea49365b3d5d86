# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder: its config and its safetensors, read lazily, tensor by tensor, slice by slice."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megarl.errors import ModelError, nearest
from megarl.families.weight_map import WeightMap
from megarl.files import read_json
from megarl.model.weights.full_config import FullConfig, full_config
from megarl.model.weights.sharded_tensor import ShardedTensor
from megarl.parallel.groups import Groups


def read_config(path: str | Path) -> FullConfig:
    """``config.json``, completed with transformers' defaults.

    Raises:
        ModelError: missing, not JSON, or with a value that transformers rejects.
        UnsupportedError: a family or a key that is not supported.
    """
    return full_config(parse_json(Path(path).expanduser() / "config.json"))


def parse_json(file: Path) -> dict[str, Any]:
    """The object in a file of a model's folder, as it stands there.

    Raises:
        ModelError: missing, not JSON, or no object.
    """
    return read_json(file, "Hugging Face folder", ModelError)


# Which file holds which tensor, where there are several.
INDEX = "model.safetensors.index.json"


# safetensors' names of the dtypes that a model is trained from.
FLOATS = ("BF16", "F16", "F32", "F64")


class WeightFolder:
    """The safetensors of a folder, opened on first use."""

    def __init__(self, path: str | Path) -> None:
        """Index the folder.

        Raises:
            ModelError: no safetensors, or an index that names a missing file or one outside the folder.
        """
        self.path = Path(path).expanduser()
        self._files: dict[Path, Any] = {}
        self.where = self._index()

    def _index(self) -> dict[str, Path]:
        index = self.path / INDEX
        if index.is_file():
            weight_map = parse_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise ModelError(f"{index} has no valid weight_map: it must be an object of file names")
            files = set(weight_map.values())
            if outside := sorted(file for file in files if file in ("", ".", "..") or Path(file).name != file):
                raise ModelError(f"{index} names the file '{outside[0]}'; it must name files of its own folder")
            missing = sorted(file for file in files if not (self.path / file).is_file())
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
        try:
            return self._open(self.where[name]).get_slice(name)
        except SafetensorError as error:
            raise ModelError(f"{INDEX} places '{name}' in {self.where[name]}, which lacks it: {error}") from error

    def check_names(self, names: WeightMap) -> None:
        """Compare the folder's tensors with those that a model has; reads no values.

        Raises:
            ModelError: one is missing, is no floating-point tensor, or has no place in the model: it would be dropped,
                and the rest be another model.
        """
        wanted, optional = names.tensor_names(), names.optional_names(self.where)
        if lost := sorted(wanted - self.where.keys()):
            raise ModelError(f"{self.path} lacks the tensor '{lost[0]}'{nearest(lost[0], self.where)}")
        if unused := sorted(self.where.keys() - wanted - optional):
            raise ModelError(
                f"{self.path} holds '{unused[0]}', which the model of its config.json has no place for "
                f"({len(unused)} such tensors); check config.json"
            )
        for name in sorted(wanted):
            check_dtype(name, self.get_slice(name), self.path)

    def load(self, tensors: Iterable[ShardedTensor], groups: Groups) -> set[str]:
        """Fill the tensors, each rank reading only its own slices; returns the names used.

        Raises:
            ModelError: a tensor is absent, has another shape or dtype, or holds a number that is not finite.
        """
        used = set()
        for tensor in tensors:
            source = self.get_slice(tensor.name)
            if tuple(source.get_shape()) != tensor.shape:
                raise ModelError(
                    f"'{tensor.name}' in {self.path} has shape {source.get_shape()}, config.json implies "
                    f"{list(tensor.shape)}"
                )
            check_dtype(tensor.name, source, self.path)
            tensor.load(_Finite(tensor.name, source, self.path), groups)
            used.add(tensor.name)
        return used


def check_dtype(name: str, source: Any, folder: Path) -> None:
    """Refuse integers (a quantised model's): they would be read as if they were weights."""
    if source.get_dtype() not in FLOATS:
        raise ModelError(
            f"'{name}' in {folder} is of dtype {source.get_dtype()}; supported are {', '.join(FLOATS)}: take the model "
            "before it was quantised"
        )


class _Finite:
    """A tensor of a file whose every part that is read is checked."""

    def __init__(self, name: str, source: Any, folder: Path) -> None:
        self.name, self.source, self.folder = name, source, folder

    def get_shape(self) -> list[int]:
        return self.source.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.source[index]
        # Much faster than isfinite; either bound is NaN where any element is.
        if part.numel() and not all(bound.isfinite() for bound in torch.aminmax(part)):
            raise ModelError(
                f"'{self.name}' in {self.folder} holds a number that is not finite; the file is damaged, or the model "
                "diverged"
            )
        return part
