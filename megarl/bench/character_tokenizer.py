# SPDX-License-Identifier: Apache-2.0
"""Make a character tokenizer with a chat template, for models of random weights."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|unk|>"]


def make_tokenizer(folder: Path) -> int:
    """Write it into a model's folder; return its number of tokens (ids 0 .. 4 are special, 0 ends a message)."""
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate(SPECIAL + characters)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", unk_token="<|unk|>", additional_special_tokens=SPECIAL[1:4]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(vocabulary)
