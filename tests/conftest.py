"""What every test goes by: the shipped prices, whatever the user that runs them has refreshed."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Names a data folder that has nothing in it, before any module is imported."""
    os.environ["XDG_DATA_HOME"] = str(config.rootpath / ".pytest_cache" / "no-data")
