# SPDX-License-Identifier: Apache-2.0
"""Fill file systems, and spoil rewards and losses."""

import os
import subprocess
import sys
from pathlib import Path

from megarl.checkpoint_engine.transports.shm_folders import ROOT

# Leaves 8 KiB of a file system.
FILL = (
    sys.executable,
    "-c",
    "import os, shutil, sys\n"
    "file = open(sys.argv[1] + '/filler', 'wb')\n"
    "os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(sys.argv[1]).free - 8192)",
)
# Gives a process and its children a /dev/shm of their own.
SMALL_SHM = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=256m tmpfs {ROOT} && exec "$@"', "sh")
# Rewards and losses that a file beside the recipe spoils.
REWARD = """
from pathlib import Path

def reward(prompt, response):
    if (Path(__file__).parent / "spoil-reward").exists():
        raise ArithmeticError("spoiled")
    return sum(character.islower() for character in response) / 8
"""
LOSS = """
from contextlib import suppress
from pathlib import Path
from megarl.loss.grpo import GrpoLoss

class OwnLoss(GrpoLoss):
    def __call__(self, *arguments, **options):
        with suppress(FileNotFoundError):
            (Path(__file__).parent / "spoil-loss-endless").unlink()  # one rank succeeds
            while True:
                pass
        output = super().__call__(*arguments, **options)
        spoiled = (Path(__file__).parent / "spoil-loss").exists()
        return output._replace(loss=output.loss * float("nan")) if spoiled else output
"""


def mount(place: Path) -> None:
    """Put a small file system of its own under a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], check=True)


def unmount(place: Path) -> None:
    """Undo ``mount``, if it was done."""
    if os.path.ismount(place):
        subprocess.run(["umount", "-l", str(place)], check=True)
