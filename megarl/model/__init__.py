# SPDX-License-Identifier: Apache-2.0
"""Build, load, step and export one model on Megatron-Core."""

from megarl.parallel import mcore

mcore.check_release()
