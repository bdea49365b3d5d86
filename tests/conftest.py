# SPDX-License-Identifier: Apache-2.0
"""Settings that all tests share."""

import os

import hypothesis

# No test asks a hub on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No deadline: the time of an example depends more on the machine's other work than on the code.
hypothesis.settings.register_profile("megarl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("megarl")
