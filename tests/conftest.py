"""Registers the shared fixtures, except in the process of pytest-xdist that runs no tests and need not import torch."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import shared_fixtures

        config.pluginmanager.register(shared_fixtures)
