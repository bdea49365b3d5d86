# SPDX-License-Identifier: Apache-2.0
# Builds an image for CUDA 13 hosts. From the repository:
#
#   docker build -f scripts/docker/cuda.Dockerfile -t megarl:cuda .
#   docker run --rm --gpus all --shm-size=16g megarl:cuda bash scripts/quickstart.sh
#
# --build-arg TRANSFORMER_ENGINE=1 also compiles Transformer Engine, which model.backend=te needs.
# --shm-size is needed because Ray, NCCL and the transfer of weights to vLLM use /dev/shm, of which Docker gives 64 MB.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG TRANSFORMER_ENGINE=
# Triton needs python3.12-dev and the compiler: it compiles its launchers when a kernel is first used.
# Ubuntu removes old versions, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git procps \
      python3.12 python3.12-dev python3.12-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megarl
# The installation is a separate layer, so that a change of the sources does not repeat it.
COPY setup.py README.md LICENSE ./
COPY requirements requirements
COPY scripts scripts
COPY megarl/__init__.py megarl/torch_addons.py megarl/
RUN MEGARL_DEVICE=cuda bash scripts/install.sh && \
    if [ -n "$TRANSFORMER_ENGINE" ]; then \
      CUDA_HOME=/usr/local/cuda .venv/bin/uv pip install --python .venv/bin/python --no-build-isolation \
        --override requirements/gpu-overrides.txt -r requirements/gpu-te.txt; \
    fi && rm -rf /root/.cache
COPY . .
ENV MEGARL_PYTHON=/opt/megarl/.venv/bin/python PATH=/opt/megarl/.venv/bin:$PATH
CMD ["bash"]
