# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

import hypothesis

# How long an example takes says more of what else the machine does than of the code.
hypothesis.settings.register_profile("megarl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("megarl")
