# SPDX-License-Identifier: Apache-2.0
"""Run scripts/install.sh and env.sh for real, on a small set of requirements."""

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SMALL = "iniconfig==2.3.1\n"


def run(repository: Path, command: str = "bash scripts/install.sh", **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("VIRTUAL_ENV", "PYTHON", "PYTHONPATH", "MEGARL_ROOT", "MEGARL_PYTHON")
    }
    environment |= {"MEGARL_DEVICE": "cpu", "PYTHON": sys.executable, "MEGARL_DEV": "", **extra}
    return subprocess.run(
        ["bash", "-c", command], cwd=repository, env=environment, capture_output=True, text=True, timeout=200
    )


def make_repository(folder: Path) -> Path:
    """Make a repository with the real installer and requirements that install in seconds."""
    (folder / "requirements").mkdir(parents=True)
    (folder / "megarl").mkdir()
    (folder / "megarl" / "__init__.py").write_text('__version__ = "0.0.1"\n')
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    lists = {"cpu.txt": "-r base.txt\n" + SMALL, "base.txt": "", "gpu.txt": "", "quickstart.txt": "", "docs.txt": ""}
    lists |= {"verifiers.txt": "", "cpu-overrides.txt": "", "dev.txt": "pluggy==1.7.0\n"}
    for name, text in lists.items():
        (folder / "requirements" / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_repository(tmp_path_factory.mktemp("install") / "a repository")
    done = run(folder)
    if done.returncode and "could not install uv" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    return folder


def imports(repository: Path, name: str) -> bool:
    return (
        subprocess.run([repository / ".venv/bin/python", "-c", f"import {name}"], capture_output=True).returncode == 0
    )


def test_installs_requirements_and_megarl_even_below_a_path_with_spaces(repository: Path) -> None:
    assert all(imports(repository, name) for name in ("iniconfig", "megarl"))


def test_the_tools_of_developers_come_when_they_are_asked_for_and_stay(repository: Path) -> None:
    assert not imports(repository, "pluggy")
    assert run(repository, MEGARL_DEV="1").returncode == 0
    assert imports(repository, "pluggy")
    done = run(repository, MEGARL_INSTALL="never")
    assert (done.returncode, done.stderr) == (0, "")


def test_second_run_is_silent_and_takes_under_two_seconds(repository: Path) -> None:
    start = time.monotonic()
    again = run(
        repository, "source scripts/env.sh && command -v python && echo $RAY_USAGE_STATS_ENABLED$HF_HUB_OFFLINE"
    )
    assert time.monotonic() - start < 2
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.split("\n")[:2] == [str(repository / ".venv/bin/python"), "01"]


def test_neither_another_path_nor_a_relative_call_nor_another_patch_release_of_python_installs_anything(
    repository: Path, tmp_path: Path
) -> None:
    stamp = (repository / ".venv/.megarl-installed").read_text()
    moved = repository.rename(tmp_path / "mounted elsewhere")
    try:
        relative = (
            "cd .. && bash 'mounted elsewhere/scripts/install.sh' && cd / && bash ../$OLDPWD/*/scripts/install.sh"
        )
        for command in ("bash scripts/install.sh", relative, "cd scripts && bash ./install.sh"):
            done = run(moved, command, MEGARL_INSTALL="never")
            assert (done.returncode, done.stderr) == (0, ""), command
        assert (moved / ".venv/.megarl-installed").read_text() == stamp
        assert "." not in stamp.split()[-1].replace("3.", "", 1)
        # This checkout's megarl, though the installation knows it by its old path.
        result = run(moved, "source scripts/env.sh && cd / && python -c 'import megarl; print(megarl.__file__)'")
        assert result.stdout.strip() == str(moved / "megarl/__init__.py")
    finally:
        moved.rename(repository)


@pytest.mark.long
def test_a_host_without_gpus_leaves_a_cuda_installation_as_it_is(repository: Path) -> None:
    for name, text in {"gpu.txt": SMALL, "gpu-overrides.txt": ""}.items():
        (repository / "requirements" / name).write_text(text)
    try:
        assert run(repository, MEGARL_DEVICE="cuda").returncode == 0
        stamp = (repository / ".venv/.megarl-installed").read_text()
        assert "requirements/gpu.txt" in stamp
        done = run(repository, "unset MEGARL_DEVICE PYTHON; PATH=/usr/bin:/bin; bash scripts/install.sh")
        assert (done.returncode, done.stderr) == (0, "")
        assert (repository / ".venv/.megarl-installed").read_text() == stamp
    finally:
        run(repository)


def test_a_node_that_must_not_install_changes_nothing_and_says_what_to_do(repository: Path, tmp_path: Path) -> None:
    requirements = repository / "requirements/cpu.txt"
    requirements.write_text(SMALL + "no-such-package==1\n")
    stamp = (repository / ".venv/.megarl-installed").read_text()
    try:
        for place in (repository, make_repository(tmp_path / "empty")):
            done = run(place, "bash scripts/launch_node.sh", NODE_RANK="1")
            assert done.returncode == 1
            assert "this node must not change it; run 'bash scripts/install.sh' on one node first" in done.stderr
        assert not (tmp_path / "empty/.venv").exists()
        assert (repository / ".venv/.megarl-installed").read_text() == stamp
    finally:
        requirements.write_text(SMALL)


def test_an_installation_whose_interpreter_this_host_lacks_is_not_replaced(repository: Path) -> None:
    interpreter = repository / ".venv/bin/python"
    target = interpreter.readlink()
    interpreter.unlink()
    interpreter.symlink_to("/no/such/python")
    try:
        done = run(repository)
        assert done.returncode == 1 and "does not run on this host" in done.stderr
    finally:
        interpreter.unlink()
        interpreter.symlink_to(target)
    assert imports(repository, "iniconfig")


def test_an_interpreter_of_the_users_own_is_used_as_it_is(tmp_path: Path) -> None:
    folder = make_repository(tmp_path / "r")
    command = "source scripts/env.sh && command -v python && python -c 'import megarl; print(megarl.__file__)'"
    done = run(folder, command, MEGARL_PYTHON=sys.executable, PYTHON="no-such-python")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [sys.executable, str(folder / "megarl/__init__.py")]
    assert not (folder / ".venv").exists()
    bare = run(folder, "source scripts/env.sh; echo $?", MEGARL_PYTHON="/usr/bin/false")
    assert bare.stdout == "1\n" and "MEGARL_PYTHON is '/usr/bin/false', which does not run or lacks ray" in bare.stderr


def test_a_changed_pin_is_installed_also_from_wheels_that_only_pips_configuration_names(
    repository: Path, tmp_path: Path
) -> None:
    for name in ("probe_one", "probe_two"):
        (tmp_path / name).mkdir()
        with zipfile.ZipFile(tmp_path / name / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(
                f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    configuration = tmp_path / "pip.conf"
    configuration.write_text(f"[global]\nfind-links =\n  {tmp_path}/probe_one\n  file://{tmp_path}/probe_two\n")
    requirements = repository / "requirements/cpu.txt"
    requirements.write_text(SMALL + "mpmath==1.3.0\nprobe_one==1.0\nprobe_two==1.0\n")
    try:
        assert not imports(repository, "mpmath")
        done = run(repository, "unset PIP_FIND_LINKS; bash scripts/install.sh", PIP_CONFIG_FILE=str(configuration))
        assert done.returncode == 0, done.stderr
        assert all(imports(repository, name) for name in ("mpmath", "probe_one", "probe_two"))
    finally:
        requirements.write_text(SMALL)
        run(repository)


@pytest.mark.long
def test_a_killed_installation_is_repaired_by_the_next_run(repository: Path) -> None:
    (repository / "requirements/quickstart.txt").write_text("networkx==3.6.1\n")
    environment = os.environ | {"MEGARL_DEVICE": "cpu", "PYTHON": sys.executable}
    first = subprocess.Popen(
        ["bash", "scripts/install.sh"],
        cwd=repository,
        env=environment,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    stamp = repository / ".venv/.megarl-installed"
    deadline = time.monotonic() + 60
    while stamp.read_text() != "unfinished\n" and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    # What a kill in the middle of copying leaves: recorded as installed, but a module is missing.
    shutil.rmtree(next((repository / ".venv").glob("lib/*/site-packages")) / "iniconfig")
    assert not imports(repository, "iniconfig")
    done = run(repository)
    assert done.returncode == 0, done.stderr
    assert imports(repository, "iniconfig") and imports(repository, "networkx")


@pytest.mark.long
def test_two_runs_at_once_install_once(repository: Path) -> None:
    shutil.rmtree(repository / ".venv")
    (repository / "scripts/both.sh").write_text(
        "bash scripts/install.sh 2>one & bash scripts/install.sh 2>two && wait $!\n"
    )
    assert run(repository, "bash scripts/both.sh").returncode == 0
    output = (repository / "one").read_text() + (repository / "two").read_text()
    assert output.count("Installed ") == 1
    assert "waiting for another installation" in output
    assert imports(repository, "megarl")


def test_a_missing_python_is_named_with_the_way_out(tmp_path: Path) -> None:
    done = run(make_repository(tmp_path / "r"), PYTHON="python3.99")
    assert done.returncode != 0
    assert "'python3.99' does not run" in done.stderr and "PYTHON=/path/to/python" in done.stderr


def test_an_unreachable_index_fails_with_the_way_out_and_sourcing_env_fails_too(tmp_path: Path) -> None:
    folder = make_repository(tmp_path / "r")
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": str(tmp_path), "PIP_NO_CACHE_DIR": "1"}
    nowhere |= {"PIP_CONFIG_FILE": "/dev/null"}
    done = run(folder, "set -e; source scripts/env.sh; echo reached", **nowhere)
    assert done.returncode != 0 and "reached" not in done.stdout
    assert "could not install uv" in done.stderr and "run again" in done.stderr
    assert (folder / ".venv/.megarl-installed").read_text() == "unfinished\n"


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    done = run(make_repository(tmp_path / "r"), MEGARL_DEVICE="tpu")
    assert done.returncode != 0 and "MEGARL_DEVICE is 'tpu'; it must be cpu or cuda" in done.stderr


@pytest.mark.parametrize("name", ["base", "cpu", "gpu", "gpu-te", "quickstart", "dev", "docs"])
def test_every_requirement_is_pinned_and_the_lists_are_sorted(name: str) -> None:
    block: list[str] = []
    for line in [*(ROOT / "requirements" / f"{name}.txt").read_text().splitlines(), ""]:
        requirement = line.split("#")[0].strip()
        if requirement.startswith("-r "):
            continue
        if requirement:
            assert "==" in requirement, f"{name}: '{requirement}' is not pinned"
            block.append(requirement.lower().split("==")[0])
        else:
            assert block == sorted(block), f"{name}: {block} is not sorted"
            block = []
