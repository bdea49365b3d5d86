# SPDX-License-Identifier: Apache-2.0
"""Registry of fuzz targets. A further target is one module here and one line in ``TARGETS``."""

from collections.abc import Callable

from tests.fuzz.harness import Target
from tests.fuzz.targets.adapters import Adapters
from tests.fuzz.targets.folders import Folders
from tests.fuzz.targets.recipes import Recipes
from tests.fuzz.targets.run_folders import RunFolders

# Name on the command line -> target, made in the process that runs the cases.
TARGETS: dict[str, Callable[[], Target]] = {
    "adapters": Adapters,
    "folders": Folders,
    "recipes": Recipes,
    "run_folders": RunFolders,
}
# Number of cases of each target in the test suite.
IN_SUITE: dict[str, int] = {"adapters": 50, "folders": 60, "recipes": 120, "run_folders": 50}
