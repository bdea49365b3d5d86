# SPDX-License-Identifier: Apache-2.0
"""The sections of a config, one model per file."""
