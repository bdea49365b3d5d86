"""Packaging. The pinned third-party releases live in requirements/, because CPU and CUDA hosts need different ones."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# Read, not imported: the build has none of the package's dependencies.
VERSION = re.search(r'__version__ = "(.+)"', (Path(__file__).parent / "megarl/__init__.py").read_text())[1]

setup(
    name="megarl",
    version=VERSION,
    description="LoRA reinforcement learning on Megatron-Core with vLLM sampling",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*"]),
    entry_points={"console_scripts": ["megarl = megarl.cli.main:main"]},
)
