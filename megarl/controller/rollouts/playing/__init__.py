# SPDX-License-Identifier: Apache-2.0
"""Play the episodes of environments, in a process of their own."""
