# SPDX-License-Identifier: Apache-2.0
"""Start a run's Ray with one actor, as `megarl train` does; print its listening addresses; wait to be killed."""

import json
import time

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


if __name__ == "__main__":
    with reaper() as scratch:
        ray_start.start_ray(run(), scratch)
        actor = ray.remote(Nothing).remote()
        node = ray.get(actor.answer.remote())
        sockets = [str(path) for path in scratch.glob("ray/session_2*/sockets/*")]
        said = {"node": node, "listening": listening(), "scratch": str(scratch), "sockets": sockets}
        print(json.dumps(said), flush=True)
        time.sleep(120)
