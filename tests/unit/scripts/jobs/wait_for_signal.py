# SPDX-License-Identifier: Apache-2.0
"""A stand-in job that runs until a signal ends it.

It writes the signal's name to the given file, and then takes the given number of seconds to end.
"""

import signal
import sys
import time
from pathlib import Path


def stop(number: int, frame: object) -> None:
    Path(sys.argv[1]).write_text(signal.Signals(number).name)
    time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0)
    raise SystemExit(5)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    Path(sys.argv[1]).write_text("running")
    time.sleep(120)
