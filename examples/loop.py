# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning with GRPO in one readable file: model, sampler, reward, loss, sync. torchrun, no Ray.

    python examples/loop.py MODEL OUT                                      # one trainer rank
    torchrun --nproc-per-node 2 examples/loop.py MODEL OUT --tensor 2      # two

MODEL is a Hugging Face folder with a chat template; OUT gets a PEFT directory. Every rank has its part of the model;
rank 0 also has the vLLM engine, in a process of its own. On a GPU host the engine takes the GPU after the trainer's, or
shares the only one. ``megarl train`` does the same, and checkpoints, resumes and records.
"""

import argparse
import contextlib
import re
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import megarl

STEPS, PROMPTS, GROUP, LEARNING_RATE = 30, 8, 8, 2e-4
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
SAMPLER = {"samples_per_prompt": GROUP, "max_prompt_tokens": 128, "max_response_tokens": 16, "max_num_seqs": 64}


def question(draw: np.random.Generator) -> tuple[str, int]:
    """A sum and its result."""
    a, b = (int(number) for number in draw.integers(1, 20, 2))
    return f"What is {a} + {b}? Reply with the number only.", a + b


def reward(text: str, result: int) -> float:
    """1 for the bare number, 0.5 where it is the last number of more text."""
    numbers = re.findall(r"\d+", text)
    right = bool(numbers) and int(numbers[-1]) == result
    return right * (1.0 if text.strip() == str(result) else 0.5)


def rollout(
    engine: megarl.SamplerProcess, tokenizer: PreTrainedTokenizerBase, draw: np.random.Generator, version: int
) -> tuple[list[megarl.Sample], float]:
    """Sample ``GROUP`` completions of each of ``PROMPTS`` questions; training sequences and the mean reward."""
    questions = [question(draw) for _ in range(PROMPTS)]
    chats = [[{"role": "user", "content": text}] for text, _ in questions]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    answers = engine.generate([np.array(prompt) for prompt in prompts], version)
    samples, rewards = [], []
    for (_, result), group in zip(questions, answers, strict=True):
        texts = [tokenizer.decode(answer.response_ids, skip_special_tokens=True) for answer in group]
        scores = np.array([reward(text, result) for text in texts])
        for answer, advantage in zip(group, megarl.group_advantages(scores, "std"), strict=True):
            tokens = np.concatenate([answer.prompt_ids, answer.response_ids])
            mask = np.arange(len(tokens)) >= len(answer.prompt_ids)
            samples.append(megarl.Sample(tokens, mask, float(advantage), sampler_logprobs=answer.logprobs))
        rewards.extend(scores)
    return samples, float(np.mean(rewards))


def on_every_rank(value: Any) -> Any:
    """Rank 0's value."""
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def main() -> None:
    """Teach sums by reward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--tensor", type=int, default=1, help="tensor parallel size of the trainer")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments = parser.parse_args()

    settings = {"path": arguments.model, "dtype": arguments.dtype}
    model = megarl.build_model(
        settings, lora=LORA, parallel={"tensor": arguments.tensor}, train={"micro_batch_tokens": 4096}
    )
    loss = megarl.build_loss({"name": "grpo", "clip_high": 0.28})
    first, draw = model.rank == 0, np.random.default_rng(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    gpus = [min(arguments.tensor, torch.cuda.device_count() - 1)] if torch.cuda.is_available() else None
    with contextlib.ExitStack() as stack:
        engines = []
        if first:
            engine = megarl.SamplerProcess(settings, lora=LORA, sampler=SAMPLER, gpus=gpus, log=f"{arguments.out}.log")
            engines = [stack.enter_context(engine)]
        weights = megarl.WeightSync(model, engines)
        weights.sync("base")
        weights.sync("adapter")
        for step in range(arguments.steps):
            samples, mean = on_every_rank(rollout(engines[0], tokenizer, draw, model.version) if first else None)
            # The denominators of the whole step, before it is cut into micro-batches and over ranks.
            counts = np.array([sample.response_mask.sum() for sample in samples])
            per_token = megarl.sequence_weights(counts, "token_mean", max_response_tokens=16)
            metrics = model.forward_backward(model.pack(samples, per_token), loss)
            update = model.optim_step(LEARNING_RATE)
            report = weights.sync("adapter")
            if first:
                print(
                    f"step {step + 1}  reward {mean:.3f}  mismatch {float(metrics['mismatch_mean']):.1e}  "
                    f"gradient norm {update['grad_norm']:.3f}  version {report.version}",
                    flush=True,
                )
    model.save_adapter(arguments.out)


if __name__ == "__main__":
    main()
