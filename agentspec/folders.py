"""Where agentspec keeps files, and who may enter."""

from __future__ import annotations

import os
from pathlib import Path

from agentspec.errors import CacheError

CACHE_VARIABLE = "AGENTSPEC_CACHE"


def root() -> Path:
    """The folder of everything that agentspec keeps: ``$AGENTSPEC_CACHE``, or ``agentspec`` in the user's cache.

    Raises ``CacheError`` for a user without a home.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser().resolve()
    if not (cache := os.environ.get("XDG_CACHE_HOME")):
        try:
            cache = str(Path.home() / ".cache")
        except RuntimeError as error:  # a user without a home
            raise CacheError(f"There is no home directory; set {CACHE_VARIABLE} to a folder of your own.") from error
    return Path(cache) / "agentspec"


def expect_private(folder: Path) -> None:
    """Raise ``CacheError`` for a folder that is not the user's, or that others may enter."""
    found = folder.stat()
    if not hasattr(os, "getuid"):  # no owners and modes to look at
        return
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CacheError(
            f"The cache folder {folder} must belong to the user alone (mode 0700): it belongs to uid {found.st_uid} "
            f"and has mode {found.st_mode & 0o777:04o}. Say `chmod 700` on it if it is yours and you trust what is in "
            f"it, or set {CACHE_VARIABLE} to another folder."
        )
