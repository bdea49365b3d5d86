# SPDX-License-Identifier: Apache-2.0
# Builds an image for hosts without a GPU. From the repository:
#
#   docker build -f scripts/docker/cpu.Dockerfile -t megarl:cpu .
#   docker run --rm --shm-size=4g megarl:cpu bash scripts/quickstart.sh
#
# --shm-size is needed because Ray and the transfer of weights to vLLM use /dev/shm, of which Docker gives 64 MB.
FROM python:3.11-slim-bookworm
# torch compiles small kernels for the CPU with g++; vLLM's are linked to libnuma. git and procps are for shells in the
# image.
# Debian removes old versions, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ git libnuma1 procps && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megarl
# The installation is a separate layer, so that a change of the sources does not repeat it.
COPY setup.py README.md LICENSE ./
COPY requirements requirements
COPY scripts scripts
COPY megarl/__init__.py megarl/torch_addons.py megarl/
RUN MEGARL_DEVICE=cpu bash scripts/install.sh && .venv/bin/python -m pip cache purge && rm -rf /root/.cache/uv
COPY . .
ENV MEGARL_PYTHON=/opt/megarl/.venv/bin/python PATH=/opt/megarl/.venv/bin:$PATH
CMD ["bash"]
