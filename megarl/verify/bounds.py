# SPDX-License-Identifier: Apache-2.0
"""Name the rows of a report, and bound their errors (see ``megarl.verify``)."""

LOGPROBS, BASE_LOGPROBS, ENTROPY = "logprobs", "logprobs, adapter off", "entropy"
GRADIENTS, EACH_GRADIENT, GRADIENT_NORM = "gradients", "each gradient", "gradient norm"
ADAPTER, UPDATE, CHECKPOINT = "adapter", "update by norm", "checkpoint elsewhere"
PEFT_LOAD, MERGED_LOAD, MERGED_WEIGHTS = "saved adapter in PEFT", "merged model in HF", "merged weights"
EXPORTED_WEIGHTS = "exported weights"
BASE_WEIGHTS = "base weights"
OF_LOGPROBS = (LOGPROBS, BASE_LOGPROBS, PEFT_LOAD, MERGED_LOAD)
# Fixed bounds in float32, in the order of the report.
BOUNDS = {
    LOGPROBS: 1e-5,
    BASE_LOGPROBS: 1e-5,
    ENTROPY: 1e-5,
    GRADIENTS: 1e-4,
    EACH_GRADIENT: 0.0,
    GRADIENT_NORM: 1e-4,
    ADAPTER: 1e-4,
    UPDATE: 2e-3,
    PEFT_LOAD: 1e-5,
    MERGED_LOAD: 1e-5,
    MERGED_WEIGHTS: 1e-6,
    EXPORTED_WEIGHTS: 1e-6,
    BASE_WEIGHTS: 0.0,
    CHECKPOINT: 1e-4,
}
# Factor of Hugging Face's own error that is allowed in float32.
SLACK = 4.0
# Largest bound, whatever the yardstick's error: a factor of the fixed bound in float32, a value in bfloat16. A lost
# tensor has an error of 1.
MOST_FLOAT32, MOST_BFLOAT16 = 100.0, 0.75
# Merged weights are rounded to the dtype of the file, which may be bfloat16.
MOST_ROUNDED = 0.02
# For single tensors by norm, in bfloat16. One tensor varies more by chance than a row, so it has more slack. A tensor
# for which Hugging Face's own error exceeds NOISE is left out.
EACH_SLACK, NOISE = 3.0, 0.5
# Rows of one number each, or about single elements. In bfloat16 chance decides which side is closer to the truth.
FLOAT32_ONLY = {ENTROPY, GRADIENT_NORM, ADAPTER}
# In float32 the row of gradients already compares each tensor.
BFLOAT16_ONLY = {EACH_GRADIENT}
