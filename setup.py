"""Packaging. The pinned third-party releases live in requirements/, because CPU and CUDA hosts need different ones."""

from setuptools import find_packages, setup

setup(
    name="megarl",
    version="0.1.0",
    description="LoRA reinforcement learning on Megatron-Core with vLLM sampling",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*"]),
    entry_points={"console_scripts": ["megarl = megarl.cli.main:main"]},
)
