# SPDX-License-Identifier: Apache-2.0
"""Floor 0. Which versions of packages are installed; nothing is imported for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from importlib import metadata


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed, by name, in their order."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
