# SPDX-License-Identifier: Apache-2.0
"""Save and load training checkpoints, with digests of their contents and the identity of the base model."""
