# SPDX-License-Identifier: Apache-2.0
"""Settings that all tests share."""

import hypothesis

# No deadline: the time of an example depends more on the machine's other work than on the code.
hypothesis.settings.register_profile("megarl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("megarl")
