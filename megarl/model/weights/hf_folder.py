# SPDX-License-Identifier: Apache-2.0
"""Read a Hugging Face folder: its config, and its safetensors, tensor by tensor and slice by slice."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from megarl.errors import ModelError, nearest
from megarl.families.weight_map import WeightMap
from megarl.files import read_json
from megarl.model.weights.full_config import FullConfig, full_config
from megarl.model.weights.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from megarl.parallel.groups import Groups


def read_config(path: str | Path) -> FullConfig:
    """Read ``config.json``, completed with transformers' defaults.

    Raises:
        ModelError: the file is missing or is not JSON, or transformers rejects a value.
        UnsupportedError: the family or a key is not supported.
    """
    return full_config(parse_json(Path(path).expanduser() / "config.json"))


def parse_json(file: Path) -> dict[str, Any]:
    """Return the JSON object of one of the folder's files, unchanged.

    Raises:
        ModelError: the file is missing, is not JSON, or holds no object.
    """
    return read_json(file, "Hugging Face folder", ModelError)


# The file that maps tensors to files, in a folder with several.
INDEX = "model.safetensors.index.json"


# safetensors' names of the dtypes that base weights may have.
FLOATS = ("BF16", "F16", "F32", "F64")


class WeightFolder:
    """The safetensors files of a folder, each opened on first use."""

    def __init__(self, path: str | Path) -> None:
        """Index the folder's tensors.

        Raises:
            ModelError: there are no safetensors, or the index names a file that is missing or outside the folder.
        """
        self.path = Path(path).expanduser()
        self._files: dict[Path, Any] = {}
        self.file_of = self._index()

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
        """Return a tensor of the folder without reading it; see ``sharded_tensor.Sliceable``.

        Raises:
            ModelError: the folder lacks it.
        """
        if name not in self.file_of:
            raise ModelError(f"{self.path} lacks the tensor '{name}'{nearest(name, self.file_of)}")
        try:
            return self._open(self.file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise ModelError(f"{INDEX} places '{name}' in {self.file_of[name]}, which lacks it: {error}") from error

    def check_names(self, names: WeightMap) -> None:
        """Compare the folder's tensors with those that the model has. Reads no values.

        Raises:
            ModelError: a tensor is missing, is not floating-point, or has no place in the model. Dropping it would make
                another model.
        """
        wanted, optional = names.tensor_names(), names.optional_names(self.file_of)
        if lost := sorted(wanted - self.file_of.keys()):
            raise ModelError(f"{self.path} lacks the tensor '{lost[0]}'{nearest(lost[0], self.file_of)}")
        if unused := sorted(self.file_of.keys() - wanted - optional):
            raise ModelError(
                f"{self.path} holds '{unused[0]}', which the model of its config.json has no place for "
                f"({len(unused)} such tensors); check config.json"
            )
        for name in sorted(wanted):
            check_dtype(name, self.get_slice(name), self.path)

    def load(self, tensors: Iterable[ShardedTensor], groups: "Groups") -> set[str]:
        """Fill the tensors, each rank reading only its own slices. Returns the names used.

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
    """Refuse integer tensors (of a quantised model), which would be read as if they were weights."""
    if source.get_dtype() not in FLOATS:
        raise ModelError(
            f"'{name}' in {folder} is of dtype {source.get_dtype()}; supported are {', '.join(FLOATS)}: take the model "
            "before it was quantised"
        )


class _Finite:
    """A tensor of a file that refuses to return numbers that are not finite."""

    def __init__(self, name: str, source: Any, folder: Path) -> None:
        self.name, self.source, self.folder = name, source, folder

    def get_shape(self) -> list[int]:
        return self.source.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.source[index]
        # Much faster than isfinite: if any element is NaN, both bounds are NaN.
        if part.numel() and not all(bound.isfinite() for bound in torch.aminmax(part)):
            raise ModelError(
                f"'{self.name}' in {self.folder} holds a number that is not finite; the file is damaged, or the model "
                "diverged"
            )
        return part
