# SPDX-License-Identifier: Apache-2.0
"""Talk to what was trained (`megarl sample`)."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from megarl.cli.progress import progress
from megarl.errors import ConfigError

PROMPT_TOKENS, RESPONSE_TOKENS = 2048, 512


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `sample` to the command line."""
    parser = commands.add_parser(
        "sample",
        help="print completions of prompts",
        description="Print completions of a run's model, an adapter or a model. Without a PROMPT, lines of standard "
        "input are the turns of one conversation.",
    )
    parser.add_argument("source", metavar="TARGET", help="RUN, RUN@STEP, PEFT directory, model or hub id")
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="each is asked by itself")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings to change")
    parser.add_argument("--raw", action="store_true", help="continue the text: no chat template, no system prompt")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="completions of each prompt")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the run's)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="as eval.tasks[].top_p")
    parser.add_argument("--max-tokens", type=int, metavar="N", help=f"of a completion (default: {RESPONSE_TOKENS})")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.set_defaults(run=sample, online=True, late="prompts")


def sample(arguments: argparse.Namespace) -> None:
    """Print the completions.

    Raises:
        ConfigError: the target or an option is wrong.
        MegarlError: sampling failed.
    """
    from megarl.cli.target import TargetEngine, engine_logs, find_target
    from megarl.config.checks import read_model_shape
    from megarl.config.load import parse_section
    from megarl.config.sections.eval import EvalTaskConfig
    from megarl.hub import offline_children
    from megarl.tokenizer import load_tokenizer

    if arguments.seed < 0:
        raise ConfigError(f"--seed is {arguments.seed}; it must be at least 0")
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(contextlib.ExitStack())
        report = shown.enter_context(progress("reading the target"))
        target = find_target(arguments.source, arguments.overrides)
        longest = read_model_shape(target.config.model.path).get("max_position_embeddings") or 2 * PROMPT_TOKENS
        most = min(RESPONSE_TOKENS, longest // 2) if arguments.max_tokens is None else arguments.max_tokens
        given = {"samples": arguments.samples, "temperature": arguments.temperature, "top_p": arguments.top_p,
                 "max_response_tokens": most}  # fmt: skip
        sampling = parse_section(EvalTaskConfig, "sample", {"name": "sample"} | given).sampling(target.config.sampler)
        if sampling.temperature == 0 and sampling.samples > 1:
            raise ConfigError(f"--temperature is 0 with --samples {sampling.samples}, which would all be the same")
        config = _with_room(target.config, longest, most)
        tokenizer = load_tokenizer(config.model.path)
        report("starting vLLM")
        stack.enter_context(offline_children())
        log = stack.enter_context(engine_logs()) / "engine.log"
        engine = stack.enter_context(TargetEngine([target], config, log))
        engine.load(target, 0)
        shown.close()
        for number, (prompt, reply) in enumerate(_prompts(arguments, config, tokenizer)):
            [answers] = engine.generate([prompt], 0, [(arguments.seed + number) % 2**31], sampling)
            texts = [tokenizer.decode(answer.response_ids, skip_special_tokens=True) for answer in answers]
            print(*texts, sep="\n---\n", flush=True)
            reply.append(texts[0])


def _with_room(config: Any, longest: int, response: int) -> Any:
    """Return the config with room for longer prompts, as far as the model's positions allow."""
    prompt = min(max(config.sampler.max_prompt_tokens, PROMPT_TOKENS), longest - response)
    if prompt < 1:
        raise ConfigError(f"--max-tokens is {response}, but the model has {longest} positions; ask for less")
    section = config.sampler
    update = {
        "max_prompt_tokens": prompt,
        "max_response_tokens": response,
        "kv_cache_gib": max(section.kv_cache_gib, 1.0),
    }
    nothing = config.eval.model_copy(update={"tasks": []})
    task = config.task.model_copy(update={"held_out": 0})
    return config.model_copy(update={"sampler": section.model_copy(update=update), "eval": nothing, "task": task})


def _prompts(arguments: argparse.Namespace, config: Any, tokenizer: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield token ids, and a list that takes the reply, which a conversation goes on with."""
    import numpy as np

    from megarl.tasks.prompting import encode_prompt
    from megarl.types import Prompt

    most, task = config.sampler.max_prompt_tokens, config.task
    history: list[dict[str, str]] = []
    for text in arguments.prompts or map(str.rstrip, sys.stdin):
        if not text.strip():
            continue
        reply: list[str] = []
        if arguments.raw:
            ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
        else:
            turn = {"role": "user", "content": text}
            messages = (*(() if arguments.prompts else history), turn)
            prompt = Prompt("sample", messages)
            ids = encode_prompt(tokenizer, prompt, task.system_prompt, most, task.chat_template_kwargs)
            history.append(turn)
        yield ids, reply
        history += [{"role": "assistant", "content": said} for said in reply]
