# SPDX-License-Identifier: Apache-2.0
"""Draw completions from one engine while versions come and go: requests, versions, what arrives, sleep."""
