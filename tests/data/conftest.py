"""Tests of the data wing leave nothing in the user's home folder."""

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """Give each test a home folder of its own for the caches that a loader makes without being asked."""
    folder = tmp_path_factory.getbasetemp() / "home"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(folder))
    return folder
