"""What is fuzzed. One more target is one more module here and one more line in ``TARGETS``."""

from collections.abc import Callable

from tests.fuzz.harness import Target
from tests.fuzz.targets.folders import Folders
from tests.fuzz.targets.recipes import Recipes

# Name on the command line -> target; made in the process that runs the cases.
TARGETS: dict[str, Callable[[], Target]] = {"folders": Folders, "recipes": Recipes}
# Cases of each that the test suite runs.
IN_SUITE: dict[str, int] = {"folders": 60, "recipes": 150}
