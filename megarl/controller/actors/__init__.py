# SPDX-License-Identifier: Apache-2.0
"""Ray actors: trainer ranks and engines, handles to call them, their logs and signs of life."""
