# SPDX-License-Identifier: Apache-2.0
"""Packaging. Releases are pinned in requirements/, nowhere else; the lists become what pip installs.

    pip install '.[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu     # a host without a GPU, Python 3.11
    pip install '.[gpu]'                                                            # a CUDA 13 host, Python 3.12

An extra asks for the pinned releases. Without one, pip leaves a container's torch, vLLM and Megatron-Core as they are,
and only asks for the libraries of base.txt, from their pinned major release on.
"""

import re
import subprocess
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
# Read, not imported: the build has none of the package's dependencies.
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megarl/__init__.py").read_text())[1]


def requirements(name: str) -> list[str]:
    """Lines of requirements/NAME.txt and of the files that it includes, without comments."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()]
    included = [pin for line in lines if line.startswith("-r ") for pin in requirements(Path(line.split()[1]).stem)]
    return [*included, *(line for line in lines if line and not line.startswith("-"))]


def from_major_release(pin: str) -> str:
    """``rich==15.0.0`` becomes ``rich>=15``."""
    return re.sub(r"==(\d+)\..*", r">=\1", pin)


def repository_url() -> dict[str, str]:
    """The address that this checkout was cloned from, where it is a public one and holds no password."""
    command = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    try:
        url = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return {}
    return {"Source": url} if re.fullmatch(r"https://[^@\s]+", url) else {}


setup(
    name="megarl",
    version=VERSION,
    description="LoRA reinforcement learning on Megatron-Core with vLLM sampling",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    project_urls=repository_url(),
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA :: 13",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    keywords=["reinforcement learning", "LoRA", "Megatron-Core", "vLLM", "GRPO", "PEFT"],
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={"megarl": ["py.typed", "startup/*.py"]},
    install_requires=[from_major_release(pin) for pin in requirements("base")],
    extras_require={name: requirements(name) for name in ("cpu", "gpu", "dev", "docs", "verifiers")},
    entry_points={"console_scripts": ["megarl = megarl.cli.main:main"]},
)
