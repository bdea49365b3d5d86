# SPDX-License-Identifier: Apache-2.0
"""Train models of transformers with adapters of PEFT behind ``MegatronModel``'s interface (``model.backend``)."""
