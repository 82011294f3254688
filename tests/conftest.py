"""Registers the shared fixtures, except in the process of pytest-xdist that runs no tests and need not import torch.

That process starts the server behind the commands that tests start, while its workers import and collect.
"""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import shared_fixtures

        config.pluginmanager.register(shared_fixtures)
    else:
        import forkserver

        forkserver.start_for_workers()
