# SPDX-License-Identifier: Apache-2.0
# An image for hosts without a GPU. From the repository:
#
#   docker build -f scripts/docker/cpu.Dockerfile -t megarl:cpu .
#   docker run --rm --shm-size=4g megarl:cpu bash scripts/quickstart.sh
#
# --shm-size: Ray and the weights on their way to vLLM use /dev/shm, of which Docker gives 64 MB by default.
FROM python:3.11-slim-bookworm
# g++: torch compiles small kernels for the CPU. git and procps: what a shell in the image expects.
RUN apt-get update && apt-get install -y --no-install-recommends g++ git procps && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megarl
# The installation is a layer of its own, so that a change of the sources does not repeat it.
COPY setup.py README.md LICENSE ./
COPY requirements requirements
COPY scripts scripts
COPY megarl/__init__.py megarl/torch_addons.py megarl/
RUN MEGARL_DEVICE=cpu bash scripts/install.sh && .venv/bin/python -m pip cache purge && rm -rf /root/.cache/uv
COPY . .
ENV MEGARL_PYTHON=/opt/megarl/.venv/bin/python PATH=/opt/megarl/.venv/bin:$PATH
CMD ["bash"]
