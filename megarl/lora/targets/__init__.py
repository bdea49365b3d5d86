# SPDX-License-Identifier: Apache-2.0
"""Resolve a PEFT config against a model: modules, parameters, ranks. Refuse what cannot be exact."""
