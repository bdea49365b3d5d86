# SPDX-License-Identifier: Apache-2.0
"""Make two machines of one, as far as Linux can: each has a network, a host name, a /dev/shm and a /tmp of its own."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.helpers.processes import describe, is_alive

ADDRESSES = {"node-a": "10.77.0.1", "node-b": "10.77.0.2"}
# Its process holds the namespaces; what is mounted in them is seen by nobody else.
HOLD = "hostname $0 && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp && echo held && exec sleep infinity"


class Machine:
    """One of the two machines. Needs root.

    Attributes:
        name, address: host name, and address in the network of both.
        holder: the process that keeps it in being.
    """

    def __init__(self, name: str) -> None:
        self.name, self.address = name, ADDRESSES[name]
        command = ["unshare", "--net", "--mount", "--uts", "--propagation", "private", "sh", "-c", HOLD, name]
        self._holding = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._holding.stdout and self._holding.stdout.readline() == "held\n"
        self.holder = self._holding.pid

    @property
    def prefix(self) -> list[str]:
        """The command that runs another one on this machine."""
        return ["nsenter", "-t", str(self.holder), "--net", "--mount", "--uts", "--"]

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command here; its output is appended to a log."""
        with log.open("ab") as file:
            return subprocess.Popen(
                [*self.prefix, *command], env=dict(environment), stdout=file, stderr=file, start_new_session=True
            )

    def run(self, *command: str) -> str:
        """Run a command here and return its output."""
        return subprocess.run([*self.prefix, *command], check=True, capture_output=True, text=True).stdout

    def cut(self) -> None:
        """Cut it off the network: nothing that is sent arrives, not even that a connection is closed."""
        self.run("ip", "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Connect it again."""
        self.run("ip", "link", "set", "eth0", "up")

    def fail(self) -> None:
        """Let it lose power."""
        self.cut()
        while found := self.processes():
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)  # psutil.wait_procs would take the exit status from whoever started them

    def boot(self) -> None:
        """Let it come back, with nothing in /tmp and /dev/shm."""
        self.run("sh", "-c", "rm -rf /tmp/* /tmp/.[a-z]* /dev/shm/*")
        self.mend()

    def processes(self) -> list[psutil.Process]:
        """Return all processes on this machine."""
        here, found = os.readlink(f"/proc/{self.holder}/ns/net"), []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if process.pid != self.holder and os.readlink(f"/proc/{process.pid}/ns/net") == here:
                    found.append(process)
        return [process for process in found if is_alive(process)]

    def left(self, seconds: float) -> str:
        """Return the processes and shared memory that are left after ``seconds``; empty if there are none."""
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        shared = self.run("find", "/dev/shm", "-name", "*megarl*").split()
        left = [*(describe(process)[:80] for process in self.processes()), *shared]
        return f"left on {self.name}: {', '.join(left)}" if left else ""

    def close(self) -> None:
        """End everything here."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._holding.kill()
        self._holding.wait()


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines with a cable between them."""
    a, b = Machine("node-a"), Machine("node-b")
    try:
        a.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(b.holder))
        for one in (a, b):
            one.run("ip", "addr", "add", f"{one.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                one.run("ip", "link", "set", device, "up")
        yield a, b
    finally:
        a.close()
        b.close()
