"""Which tests come first."""

from typing import Any

# Files are given to workers in this order: the longest last would leave the other workers without work at the end.
FIRST = ("tests/e2e/test_train.py", "tests/e2e/", "tests/distributed/")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Put the longest first; otherwise the order stays."""

    def place(item: Any) -> int:
        return next((index for index, start in enumerate(FIRST) if item.nodeid.startswith(start)), len(FIRST))

    items.sort(key=place)
