#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts one run on several machines. Run it on each of them, with the same arguments and its own NODE_RANK.
#
#   NODE_RANK=0 NNODES=2 HEAD_ADDR=10.0.0.1 bash scripts/launch_node.sh RECIPE.yaml [key=value ...]     # on 10.0.0.1
#   NODE_RANK=1 NNODES=2 HEAD_ADDR=10.0.0.1 bash scripts/launch_node.sh RECIPE.yaml [key=value ...]     # on the other
#
# Rank 0 starts Ray's head, waits for the others and runs `megarl train`. The others leave when it ends. Each launcher
# exits with the job's status and leaves no process behind, after Ctrl-C and SIGTERM too. With `-- COMMAND ...` instead
# of the recipe, rank 0 runs that command (with RAY_ADDRESS set).
#
#   HEAD_PORT=6379      port of Ray's head, the same on every node
#   JOIN_TIMEOUT=300    seconds to wait for the head, and for all nodes
#   JOB_GRACE=40        seconds that the run may take to end after a signal: it does the step that it is in, and saves
#   NODE_CPUS, NODE_GPUS   CPUs and GPUs of this node that Ray may use (default: all); 0 on rank 0: controller only
#   MEGARL_SETUP        a file for bash to read first: `module load ...`, `export NCCL_SOCKET_IFNAME=...`
#   MEGARL_PYTHON       an interpreter with all packages; default: .venv of this repository, which only rank 0 installs
#
# Recipe, model and output paths must mean the same on every node (a shared file system, or copies).
set -euo pipefail

# Modules use variables that may be unset.
if [ -n "${MEGARL_SETUP:-}" ]; then
  set +u
  # shellcheck source=/dev/null
  source "$MEGARL_SETUP"
  set -u
fi
# Several nodes may share .venv, so only one of them installs.
[ "${NODE_RANK:-0}" = 0 ] || export MEGARL_INSTALL=never
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec "$MEGARL_INTERPRETER" -m megarl.launch.nodes.node "$@"
