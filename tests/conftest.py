"""Which tests come first."""

from typing import Any

# Files are given to workers in this order. The longest last would leave the other worker without work at the end; and
# two files that start engines at the same time would keep each other waiting.
FIRST = ("tests/e2e/test_train.py", "tests/distributed/", "tests/e2e/")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Put the longest first; otherwise the order stays."""

    def place(item: Any) -> int:
        return next((index for index, start in enumerate(FIRST) if item.nodeid.startswith(start)), len(FIRST))

    items.sort(key=place)
