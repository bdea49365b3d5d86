# SPDX-License-Identifier: Apache-2.0
"""A chat template for the tokenizer of tiny models (``megarl.bench.character_tokenizer``) that shows tools."""

# Shows tools, and writes calls like Qwen's templates.
CALLING = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{% for call in message.tool_calls or [] %}"
    "<call>{{ call.function | tojson }}</call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
