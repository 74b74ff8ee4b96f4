"""A pytest plugin that stands in for pytest-mpi where that is not installed: `-p mpizero.testing.with_mpi`.

It has the option `--with-mpi` and the marker `mpi`, which skips a test without that option; no more is used here.
"""

from __future__ import annotations

import pytest

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add pytest-mpi's option."""
    parser.getgroup("mpi").addoption("--with-mpi", action="store_true", help="run tests that need MPI")


def pytest_configure(config: pytest.Config) -> None:
    """Make pytest-mpi's marker known."""
    config.addinivalue_line("markers", "mpi: needs MPI")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that need MPI where it was not asked for."""
    if not config.getoption("--with-mpi"):
        for item in items:
            if item.get_closest_marker("mpi"):
                item.add_marker(pytest.mark.skip(reason="need --with-mpi option to run"))
