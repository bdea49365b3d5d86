# SPDX-License-Identifier: Apache-2.0
"""Note what each Python process does, ten times a second: first on PYTHONPATH, with MEGARL_STACKS=FOLDER.

Each process writes FOLDER/PID.stacks, forked ones too; `python3 -m tests.gpu.stack_tree FOLDER` adds them up.
"""

import os
import sys
import threading
import time

FOLDER = os.environ.get("MEGARL_STACKS")
SECONDS, DEEPEST = 0.1, 80


def _note() -> None:
    main = threading.main_thread().ident
    with open(f"{FOLDER}/{os.getpid()}.stacks", "w", buffering=1) as file:
        file.write(repr(" ".join(sys.orig_argv))[:160] + "\n")
        while True:
            frame, names = sys._current_frames().get(main), []
            while frame is not None and len(names) < DEEPEST:
                code = frame.f_code
                names.append(f"{'/'.join(code.co_filename.split('/')[-3:])}:{code.co_name}")
                frame = frame.f_back
            file.write(f"{time.time():.2f} {';'.join(reversed(names))}\n")
            time.sleep(SECONDS)


def _begin() -> None:
    threading.Thread(target=_note, daemon=True, name="stacks").start()


if FOLDER:
    _begin()
    os.register_at_fork(after_in_child=_begin)
