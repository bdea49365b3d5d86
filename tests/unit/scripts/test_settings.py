# SPDX-License-Identifier: Apache-2.0
"""Name each mistake in the environment of launch_node.sh, before anything is started."""

import socket
import sys
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.launch.nodes.settings import read_settings

GOOD = {"NODE_RANK": "1", "NNODES": "2", "HEAD_ADDR": "127.0.0.1", "NODES_ON_THIS_HOST": "1"}


def test_defaults_and_the_recipe_becomes_megarl_train(tmp_path: Path) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.touch()
    settings = read_settings(GOOD, [str(recipe), "train.steps=3"])
    assert (settings.rank, settings.nodes, settings.address) == (1, 2, "127.0.0.1:6379")
    assert (settings.join_timeout, settings.cpus, settings.gpus) == (300, None, None)
    assert settings.command == (sys.executable, "-m", "megarl.cli.main", "train", str(recipe), "train.steps=3")


def test_a_command_of_the_users_own_is_passed_on_word_by_word() -> None:
    assert read_settings(GOOD, ["--", "python", "-c", "a b"]).command == ("python", "-c", "a b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"NNODES": ""}, "NNODES is not set; it must be an integer of at least 1"),
        ({"NNODES": "0"}, "NNODES is '0'; it must be an integer of at least 1"),
        ({"NNODES": "two"}, "NNODES is 'two'"),
        ({"NODE_RANK": ""}, "NODE_RANK is not set; it must be an integer from 0 to 1"),
        ({"NODE_RANK": "2"}, "NODE_RANK is '2'; it must be an integer from 0 to 1"),
        ({"NODE_RANK": "-1"}, "NODE_RANK is '-1'"),
        ({"NODE_RANK": "²"}, "NODE_RANK is '²'"),
        ({"HEAD_ADDR": ""}, "HEAD_ADDR is not set"),
        ({"HEAD_ADDR": "no such host"}, "HEAD_ADDR is 'no such host', which does not resolve"),
        ({"HEAD_PORT": "80"}, "HEAD_PORT is '80'; it must be an integer from 1024 to 65535"),
        ({"JOIN_TIMEOUT": "0"}, "JOIN_TIMEOUT is '0'"),
        ({"NODE_CPUS": "-1"}, "NODE_CPUS is '-1'"),
        ({"NODE_GPUS": "all"}, "NODE_GPUS is 'all'"),
        ({"NODE_RANK": "0", "HEAD_ADDR": "192.0.2.77"}, "is not an address of this node, but NODE_RANK is 0"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(GOOD | changes, ["--", "true"])
    assert message in str(caught.value)


def test_a_port_in_use_on_the_head_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"HEAD_PORT {port} is in use"):
            read_settings(GOOD | {"NODE_RANK": "0", "HEAD_PORT": str(port)}, ["--", "true"])


@pytest.mark.parametrize("head", ["127.0.0.1", "localhost", "127.0.1.1"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_head_that_only_its_own_host_reaches_is_refused_on_several_nodes(head: str, rank: str) -> None:
    several = {"NODE_RANK": rank, "NNODES": "2", "HEAD_ADDR": head}
    with pytest.raises(ConfigError, match=rf"HEAD_ADDR is '{head}', which is 127\.0\..*only this host reaches"):
        read_settings(several, ["--", "true"])
    assert read_settings(several | {"NODE_RANK": "0", "NNODES": "1"}, ["--", "true"]).nodes == 1


@pytest.mark.parametrize("arguments", [[], ["--"]])
def test_no_job_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="no job given"):
        read_settings(GOOD, arguments)


def test_a_missing_recipe_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"recipe 'nowhere\.yaml' does not exist on this node"):
        read_settings(GOOD, ["nowhere.yaml"])


def test_a_command_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="command '/no/such/program' is not a program on this node"):
        read_settings(GOOD, ["--", "/no/such/program", "argument"])
