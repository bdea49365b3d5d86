# SPDX-License-Identifier: Apache-2.0
"""Random changes of files: bytes, trees of JSON or YAML, safetensors. A target chooses among them."""

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.fuzz.harness import Mutation

# Replacements of values: wrong types, wrong signs, numbers that overflow or allocate, paths, expressions.
ODD = (
    None, True, False, -1, 0, 1, 7, 10**9, 10**19, -(10**19), 0.5, 1e308, -1e308, 1e-320, math.nan, math.inf, "", " ",
    "null", "8", "x", "x" * 5000, "\0", "\n", "é\u202e", "[", "(", "*", "**", "${nothing}", "../..", "/proc/self/mem",
    "~nosuchuser/x", "n" * 300, [], [None], ["["], [[]], ["x", "x"], {}, {"": None}, {"x": {"x": []}},
)  # fmt: skip


def bytes_of(file: Path, draw: Random) -> Mutation:
    """Flip a bit, cut, empty, repeat or overwrite a part of a file, or remove it."""
    data = bytearray(file.read_bytes())
    place = draw.randrange(len(data)) if data else 0
    kind = draw.choice(["bit", "cut", "empty", "garbage", "append", "gone", "folder", "link", "zeros"])
    if kind == "bit" and data:
        data[place] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[place:]
    elif kind == "empty":
        data.clear()
    elif kind == "garbage":
        data[place : place + 16] = draw.randbytes(16)
    elif kind == "zeros":
        data[place:] = bytes(len(data) - place)
    elif kind == "append":
        data += draw.choice([b"\0", b"}", b"\n{", draw.randbytes(100)])
    if kind in ("gone", "folder", "link"):
        file.unlink()
        if kind == "folder":
            file.mkdir()
        elif kind == "link":
            file.symlink_to(draw.choice(["nowhere", file.name, "/dev/null"]))
    else:
        file.write_bytes(bytes(data))
    return Mutation(f"{file.name}: {kind} at byte {place}")


def json_of(file: Path, draw: Random) -> Mutation:
    """Change one place of a JSON file's tree."""
    tree = json.loads(file.read_text())
    change = tree_of(tree, draw)
    file.write_text(json.dumps(tree))
    return Mutation(f"{file.name}: {change}")


def yaml_of(file: Path, draw: Random) -> Mutation:
    """Change one place of a YAML file's tree."""
    tree = yaml.load(file.read_text(), yaml.CSafeLoader)
    change = tree_of(tree, draw)
    file.write_text(yaml.dump(tree, Dumper=yaml.CSafeDumper, sort_keys=False))
    return Mutation(f"{file.name}: {change}")


def tree_of(tree: Any, draw: Random) -> str:
    """Replace, remove, rename or move one value of a tree of mappings and lists, in place; return what was done."""
    places = [(node, key, path) for node, key, path in _places(tree, "") if path]
    node, key, path = draw.choice(places)
    kind = draw.choice(["replace", "replace", "replace", "replace", "replace", "remove", "rename", "swap", "nudge"])
    if kind == "remove":
        del node[key]
    elif kind == "rename" and isinstance(node, dict):
        letters = list(key) or ["x"]
        letters.insert(draw.randrange(len(letters) + 1), draw.choice("_sxA."))
        node["".join(letters)] = node.pop(key)
    elif kind == "swap":
        other, other_key, other_path = draw.choice(places)
        node[key] = json.loads(json.dumps(other[other_key], default=str))
        return f"{path} = {_shown(node[key])} (from {other_path})"
    elif kind == "nudge" and isinstance(node[key], int | float) and not isinstance(node[key], bool):
        node[key] = draw.choice([node[key] + 1, node[key] - 1, -node[key], node[key] * 2, float(node[key])])
        return f"{path} = {_shown(node[key])}"
    else:
        node[key] = draw.choice(ODD)
        return f"{path} = {_shown(node[key])}"
    return f"{kind} {path}"


def _places(node: Any, path: str) -> list[tuple[Any, Any, str]]:
    """Return ``(container, key, dotted path)`` of every value below ``node``."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    places = []
    for key in keys:
        below = f"{path}.{key}" if path else str(key)
        places += [(node, key, below), *_places(node[key], below)]
    return places


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def safetensors_of(file: Path, draw: Random) -> Mutation:
    """Change one tensor of a file: its shape, dtype, name or values; or remove it, or add one."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    name = draw.choice(sorted(tensors))
    tensor = tensors[name]
    kind = draw.choice(["remove", "rename", "extra", "shape", "transpose", "scalar", "empty", "nan", "inf", "dtype"])
    if kind in ("remove", "rename"):
        del tensors[name]
        if kind == "rename":
            tensors[f"{name}x"] = tensor
    elif kind == "extra":
        tensors[f"{name}.more"] = tensor.clone()
    elif kind == "dtype":
        dtype = draw.choice([torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool])
        tensors[name] = tensor.to(dtype)
        kind = f"{kind} {dtype}"
    elif kind in ("nan", "inf"):
        if tensor.is_floating_point() and tensor.numel():
            tensor.view(-1)[draw.randrange(tensor.numel())] = float(kind)
    else:
        tensors[name] = {
            "shape": lambda: tensor[..., :-1],
            "transpose": lambda: tensor.movedim(0, -1),
            "scalar": lambda: tensor.reshape(-1)[0],
            "empty": lambda: tensor[..., :0],
        }[kind]().contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return Mutation(f"{file.name}: {kind} of {name}")
