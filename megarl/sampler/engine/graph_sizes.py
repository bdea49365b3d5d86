# SPDX-License-Identifier: Apache-2.0
"""Choose the batch sizes for which vLLM captures CUDA graphs."""

# vLLM captures none for batches of more than 512 tokens, and launches make those of a small model slow: 1,024 requests
# of Qwen3-0.6B made half the tokens per second of 512 with graphs (H100). FlashAttention 3 schedules at most 992
# sequences (vLLM PR 20301); a padded batch in a whole graph of 1,024 read memory that is not its own.
LARGEST = 992
# Steps that also compute prompts have more tokens than requests: vLLM's own factor, and the most of them.
MIXED, PROMPT_TOKENS = 2, 256
# Distance of two sizes, from a size on. Capturing takes 0.1 s for each size, for decode steps and for mixed ones (20 s
# for vLLM's own 51 sizes). A batch is padded to the next size, which costs less than that.
STEPS = {1: 1, 2: 2, 4: 4, 8: 8, 64: 16, 128: 32, 256: 64, 512: 128}


def graph_sizes(max_num_seqs: int, most_requests: int | None = None) -> list[int]:
    """Return the sizes that can occur, in tokens, a step apart and in ascending order.

    Args:
        max_num_seqs: ``sampler.max_num_seqs``.
        most_requests: most completions that the engine is asked for at once; None: unknown.
    """
    requests = min(max_num_seqs, most_requests or max_num_seqs)
    top = min(MIXED * requests, requests + PROMPT_TOKENS, LARGEST)
    sizes = {min(requests, top), top}
    for (begin, step), end in zip(STEPS.items(), [*list(STEPS)[1:], top], strict=True):
        sizes |= set(range(begin, min(end, top), step))
    return sorted(sizes)
