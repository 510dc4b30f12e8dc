"""The version of this package, without anything that takes time to load."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Return the version of the installed package, ``not installed`` in a bare checkout."""
    try:
        return version("needlepoint")
    except PackageNotFoundError:
        return "not installed"
