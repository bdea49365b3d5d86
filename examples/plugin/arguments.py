# SPDX-License-Identifier: Apache-2.0
"""Parse those arguments of Megatron-LM's ``pretrain_gpt.py`` that the example understands, and arguments for LoRA."""

import argparse
from collections.abc import Sequence


def parse_args(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line. Every flag outside the last group means the same as in ``pretrain_gpt.py``."""
    parser = argparse.ArgumentParser(description="LoRA on a Megatron-Core GPTModel")
    for add in (_model, _training, _parallel, _checkpoint, _lora):
        add(parser)
    args = parser.parse_args(given)
    args.num_query_groups = args.num_query_groups if args.group_query_attention else None
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    return args


def _model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network size")
    for name in ("num-layers", "hidden-size", "num-attention-heads", "max-position-embeddings", "vocab-size"):
        group.add_argument(f"--{name}", type=int, required=True)
    for name in ("ffn-hidden-size", "kv-channels"):
        group.add_argument(f"--{name}", type=int)
    group.add_argument("--group-query-attention", action="store_true")
    group.add_argument("--num-query-groups", type=int, default=1)
    group.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    group.add_argument("--normalization", default="LayerNorm", choices=["LayerNorm", "RMSNorm"])
    group.add_argument("--norm-epsilon", type=float, default=1e-5)
    group.add_argument("--position-embedding-type", default="learned_absolute", choices=["learned_absolute", "rope"])
    group.add_argument("--rotary-base", type=int, default=10000)
    for flag in ("swiglu", "disable-bias-linear", "add-qkv-bias", "qk-layernorm"):
        group.add_argument(f"--{flag}", action="store_true")
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")


def _training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--seq-length", type=int, required=True)
    group.add_argument("--micro-batch-size", type=int, required=True)
    group.add_argument("--global-batch-size", type=int, required=True)
    group.add_argument("--train-iters", type=int, required=True)
    group.add_argument("--lr", type=float, required=True)
    group.add_argument("--min-lr", type=float, default=0.0)
    group.add_argument("--lr-decay-style", default="linear", choices=["constant", "linear", "cosine"])
    group.add_argument("--lr-warmup-iters", type=int, default=0)
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.999)
    group.add_argument("--adam-eps", type=float, default=1e-8)
    group.add_argument("--attention-dropout", type=float, default=0.1)
    group.add_argument("--hidden-dropout", type=float, default=0.1)
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--log-interval", type=int, default=100)


def _parallel(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("distributed")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--distributed-timeout-minutes", type=int, default=10)
    for flag in ("sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather"):
        group.add_argument(f"--{flag}", action="store_true")


def _checkpoint(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpointing")
    group.add_argument("--save", help="folder of mcore's distributed checkpoints: adapter, optimizer, schedule")
    group.add_argument("--save-interval", type=int)
    group.add_argument("--load", help="such a folder; another layout may have written it")
    group.add_argument("--pretrained-checkpoint", help="a distributed checkpoint of the base model, made without LoRA")


def _lora(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("LoRA (not Megatron-LM's)")
    group.add_argument("--hf-model", required=True, help="Hugging Face folder: config.json names the family; weights")
    group.add_argument("--lora-rank", type=int, default=8)
    group.add_argument("--lora-alpha", type=float, default=16)
    group.add_argument("--lora-target-modules", nargs="+", default=["all-linear"])
    group.add_argument("--load-adapter", help="PEFT directory to start from; its own config counts")
    group.add_argument("--save-adapter", help="PEFT directory to write")
