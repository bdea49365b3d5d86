# SPDX-License-Identifier: Apache-2.0
"""The Megatron-Core side: building, loading, stepping and exporting one exact model."""

from megarl.parallel import mcore

mcore.check_release()
