# SPDX-License-Identifier: Apache-2.0
"""Start a run's Ray with one actor, as `megarl train` does; print its listening addresses; wait to be killed.

With the argument `late` Ray's node is not there in time when it is first started.
"""

import json
import sys
import time
from typing import Any

import psutil
import ray

from megarl.launch.placement import ray_start
from megarl.launch.reaper import reaper
from tests.unit.launch.placement.test_plan import run


class Nothing:
    def answer(self) -> str:
        return ray.util.get_node_ip_address()


def listening() -> list[str]:
    """Return the addresses on which this process and its descendants listen."""
    addresses = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        addresses |= {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return sorted(addresses)


def be_late_once() -> None:
    """Let Ray's first start end without its node, whose processes run."""
    services, get_node = ray._private.services, ray._private.services.get_node

    def late(*given: Any) -> None:
        services.get_node = get_node
        raise Exception("the node is late")

    services.get_node = late


if __name__ == "__main__":
    if "late" in sys.argv:
        be_late_once()
    with reaper() as scratch:
        ray_start.start_ray(run(), scratch)
        actor = ray.remote(Nothing).remote()
        node = ray.get(actor.answer.remote())
        sockets = [str(path) for path in scratch.glob("ray/session_2*/sockets/*")]
        said = {"node": node, "listening": listening(), "scratch": str(scratch), "sockets": sockets}
        print(json.dumps(said), flush=True)
        time.sleep(120)
