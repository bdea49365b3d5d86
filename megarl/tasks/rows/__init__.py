# SPDX-License-Identifier: Apache-2.0
"""Read and validate the rows of a data set."""
