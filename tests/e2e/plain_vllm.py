# SPDX-License-Identifier: Apache-2.0
"""Ask vLLM itself, without megarl: for logprobs of a folder's model, and for a server's completion."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PROGRAM = """
import json, sys
from megarl.sampler import prepare_environment
prepare_environment(1)
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=128,
          kv_cache_memory_bytes=50 * 2**20)
prompts = [{"prompt_token_ids": tokens} for tokens in json.loads(sys.argv[2])]
outs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
print(json.dumps([[next(iter(d.values())).logprob for d in out.prompt_logprobs[1:]] for out in outs]))
"""


def prompt_logprobs(model: Path, tokens: list[list[int]]) -> list[list[float]]:
    """Return the logprobs of all tokens but the first of each sequence, by an engine in a process of its own."""
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), json.dumps(tokens)],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    return json.loads(out.stdout.strip().splitlines()[-1])


def ask(port: int, server: subprocess.Popen, body: dict) -> dict:
    """Ask the server for a completion, as soon as it listens."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 200
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
        except OSError:
            assert server.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.5)
