# SPDX-License-Identifier: Apache-2.0
"""Load the user's own objects by name: ``file.py:Name`` or ``package.module:Name``."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from megarl.errors import ConfigError, MegarlError, nearest, pick
from megarl.files import find_file


def pick_or_load(registry: Mapping[str, Any], name: str, what: str, field: str, folder: Path | None = None) -> Any:
    """Return an entry of a registry, or the object that ``name`` locates.

    Args:
        registry: maps names to entries.
        name: a registered name, ``file.py:Name`` or ``package.module:Name``.
        what: what the registry holds, for the message (``"loss"``).
        field: dotted name of the setting.
        folder: see ``load_object``.

    Raises:
        ConfigError: the name is unknown, or ``load_object`` fails.
    """
    return load_object(name, field, folder) if ":" in name else pick(dict(registry), name, what)


def load_object(spec: str, field: str, folder: Path | None = None) -> Any:
    """Import the object that a setting names.

    Args:
        spec: ``file.py:Name`` or ``package.module:Name``.
        field: dotted name of the setting, for messages.
        folder: folder in which a relative file is looked up before the current folder; None: the current folder only.

    Raises:
        ConfigError: the value is malformed, there is no such file or module, it cannot be imported, or it lacks the
            name.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(f"{field} is '{spec}'; it must have the form file.py:Name or package.module:Name")
    module = (
        import_file(find_file(field, place, folder), field, spec)
        if place.endswith(".py")
        else _module(place, field, spec)
    )
    if not hasattr(module, name):
        names = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(
            f"{field} is '{spec}', but {place} has no '{name}'{nearest(name, names)} (it has: {', '.join(names)})"
        )
    return getattr(module, name)


def source_of(spec: str, field: str) -> bytes:
    """Return the source of the file or module that ``spec`` names; empty for a module without one.

    Raises:
        ConfigError: there is no such file.
    """
    place = spec.rpartition(":")[0]
    if place.endswith(".py"):
        return find_file(field, place).read_bytes()
    file = getattr(_module(place, field, spec), "__file__", None)
    return Path(file).read_bytes() if file else b""


def import_file(file: Path, field: str, spec: str) -> Any:
    """Import a Python file under a module name that is unique to it.

    Args:
        file: the file; exists and ends in ``.py``.
        field: dotted name of the setting that names the file.
        spec: the setting's value.

    Raises:
        ConfigError: the file cannot be imported. A MegarlError that it raises is passed on.
    """
    name = f"megarl_user_{file.stem}_{xxhash.xxh3_64(str(file).encode()).hexdigest()}"
    module_spec = importlib.util.spec_from_file_location(name, file)
    assert module_spec is not None and module_spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        module_spec.loader.exec_module(module)
    except MegarlError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{field} is '{spec}', but {file} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return module


def absolute(spec: str, field: str, folder: Path) -> str:
    """Return ``spec`` with an absolute path of its file, because other processes have other working directories.

    Raises:
        ConfigError: there is no such file.
    """
    place, colon, name = spec.rpartition(":")
    return f"{find_file(field, place, folder)}{colon}{name}" if place.endswith(".py") else spec


def _module(name: str, field: str, spec: str) -> Any:
    try:
        return importlib.import_module(name)
    except MegarlError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{field} is '{spec}', but {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
