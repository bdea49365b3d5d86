# SPDX-License-Identifier: Apache-2.0
"""Place the actors on the cluster, and run a training from start to end."""
