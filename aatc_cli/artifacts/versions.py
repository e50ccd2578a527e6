"""Versions that figures depend on, recorded beside them and never hashed."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from aatc_cli.version import __version__


def versions() -> dict[str, str]:
    """Versions of this package, Python and the libraries that compute."""
    found = {"aatc": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
