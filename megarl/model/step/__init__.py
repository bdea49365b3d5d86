# SPDX-License-Identifier: Apache-2.0
"""Run one training step: pack samples, run the pipeline schedule, replay CUDA graphs."""
