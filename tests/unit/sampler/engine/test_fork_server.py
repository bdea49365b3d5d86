# SPDX-License-Identifier: Apache-2.0
"""Test the processes that begin with their imports done. A run's engine begins in one (tests/e2e/test_train.py)."""

import os
import subprocess
import sys
from concurrent.futures import Future

import pytest

from megarl.sampler.engine import fork_server

# Its fork server imports one module of the standard library, which the process must find imported.
PROGRAM = """
import os, sys
from megarl.sampler.engine import fork_server

def tell(pipe):
    pipe.send((os.environ.get("MEGARL_LATE"), os.environ.get("MEGARL_EARLY"), "colorsys" in sys.modules))

if __name__ == "__main__":
    os.environ["MEGARL_EARLY"] = "1"
    fork_server.PRELOAD[:] = []
    fork_server.WORKERS["cpu"] = "colorsys"
    fork_server.begin("fast", "cpu")
    del os.environ["MEGARL_EARLY"]
    os.environ["MEGARL_LATE"] = "2"
    context = fork_server._Context()
    ours, theirs = context.Pipe()
    process = context.Process(target=tell, args=(theirs,))
    process.start()
    print(ours.recv())
    process.join()
    raise SystemExit(process.exitcode)
"""

WITHOUT_GPUS = """
import sys
from megarl.sampler.engine import fork_server

if __name__ == "__main__":
    fork_server.PRELOAD[:] = []
    fork_server.WORKERS["cuda"] = sys.argv[1]
    fork_server.begin("fast", "cuda")
    print(fork_server._usable.result())
"""


def test_a_process_has_the_imports_of_the_server_and_the_environment_of_its_starter(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "('2', None, True)\n"), done.stderr


@pytest.mark.parametrize("usable", [True, False, None])
def test_vllm_takes_it_only_if_it_is_usable_and_only_in_the_block(usable, monkeypatch):
    utils = pytest.importorskip("vllm.v1.engine.utils")
    known = None
    if usable is not None:
        known = Future()
        known.set_result(usable)
    monkeypatch.setattr(fork_server, "_usable", known)
    calls = []
    monkeypatch.setattr(utils, "get_mp_context", lambda: calls.append("vllm's"))
    own = utils.get_mp_context
    with fork_server.forked():
        assert isinstance(utils.get_mp_context(), fork_server._Context) is (usable is True)
    assert calls == ["vllm's"] and utils.get_mp_context is own


def test_the_modules_that_it_imports_exist():
    pytest.importorskip("vllm")
    from importlib.util import find_spec

    assert all(find_spec(name) for name in [*fork_server.PRELOAD, *fork_server.WORKERS.values()])


@pytest.mark.parametrize("module", ["colorsys", "a_module_that_raises"])
def test_vllm_starts_its_own_way_where_forked_processes_have_no_gpus(module, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_GPUS)
    (tmp_path / "a_module_that_raises.py").write_text("raise RuntimeError\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(program), module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
