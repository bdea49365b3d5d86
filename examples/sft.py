# SPDX-License-Identifier: Apache-2.0
"""Fine-tune an adapter on examples (SFT), at any layout, in one readable file.

    python examples/sft.py MODEL OUT                                       # one rank
    torchrun --nproc-per-node 2 examples/sft.py MODEL OUT --tensor 2       # two

MODEL is a Hugging Face folder with a chat template; OUT gets a PEFT directory.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import islice

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import megarl

STEPS, BATCH, LEARNING_RATE = 20, 16, 1e-3


def make_sample(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> megarl.Sample:
    """Make one sequence of question and answer. The answer and the token that ends it are learned."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    response = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    mask = np.arange(len(prompt) + len(response)) >= len(prompt)
    return megarl.Sample(tokens=np.array([*prompt, *response]), response_mask=mask)


def batches(tokenizer: PreTrainedTokenizerBase) -> Iterator[list[megarl.Sample]]:
    """Yield batches of random sums of two numbers, the same on every rank."""
    draw = random.Random(0)
    while True:
        pairs = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(BATCH)]
        yield [make_sample(tokenizer, f"What is {a} + {b}?", f"{a + b}") for a, b in pairs]


def main() -> None:
    """Train an adapter on sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--tensor", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = megarl.build_model(
        arguments.model,
        lora={"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
        parallel={"tensor": arguments.tensor},
        train={"micro_batch_tokens": 1024},
    )
    for step, samples in enumerate(islice(batches(tokenizer), arguments.steps)):
        # The weights refer to the whole step, before it is split into micro-batches and over ranks.
        counts = np.array([sample.response_mask.sum() for sample in samples])
        weights = megarl.sequence_weights(counts, "token_mean", max_response_tokens=int(counts.max()))
        metrics = model.forward_backward(model.pack(samples, weights), megarl.NllLoss())
        norm = model.optim_step(LEARNING_RATE)["grad_norm"]
        if model.groups.rank == 0:
            print(f"step {step + 1}  nll {float(metrics['nll']):.3f}  gradient norm {norm:.3f}", flush=True)
    model.save_adapter(arguments.out)


if __name__ == "__main__":
    main()
