# SPDX-License-Identifier: Apache-2.0
"""Where the actors go, and a run from start to end."""
