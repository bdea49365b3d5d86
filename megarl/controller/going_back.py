# SPDX-License-Identifier: Apache-2.0
"""Continue a run from a checkpoint: a new session, or one whose trainers were lost."""

from typing import TYPE_CHECKING

from megarl.controller.recording.resumption import Resumption, find_last

if TYPE_CHECKING:
    from megarl.controller.state import RunState


def resume(state: "RunState", resumed: Resumption) -> None:
    """Load a checkpoint everywhere. The run folder is written to only when nothing can fail to load any more."""
    saved = state.trainers.call("load_checkpoint", str(resumed.checkpoint))[0]
    state.restore(saved, other_data=resumed.other_data)
    state.recorder.begin(resumed)
    for note in resumed.notes:
        state.recorder.screen.say(note)
    state.recorder.screen.say(f"resumed at step {state.step} from {resumed.checkpoint}")


def go_back(state: "RunState") -> None:
    """Continue from the last complete checkpoint, or from the beginning if there is none. The ranks are new.

    Raises:
        MegarlError: the checkpoint cannot be read or loaded.
    """
    recorder = state.recorder
    found = find_last(recorder.folder, state.config, state.origin["contents"])
    if found.step:
        saved = state.trainers.call("load_checkpoint", str(found.checkpoint))[0]
        state.restore(saved, other_data=found.other_data)
    else:
        state.restore(state.start)
    recorder.go_back(found)
    recorder.screen.say(f"back at step {state.step}" + (f" from {found.checkpoint}" if found.step else ""))
