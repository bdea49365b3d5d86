# SPDX-License-Identifier: Apache-2.0
"""The RL loop and the Ray actors it talks to."""
