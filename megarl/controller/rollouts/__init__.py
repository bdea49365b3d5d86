# SPDX-License-Identifier: Apache-2.0
"""From prompts to scored completions: the stream of data, sampling ahead, rewards, which groups are trained on."""
