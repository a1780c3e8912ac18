"""Folders of agentspec's files, and checks of their owners and modes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from agentspec.errors import CacheError

CACHE_VARIABLE = "AGENTSPEC_CACHE"

_WRITE_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # on the way to a folder, as Linux allows


def root() -> Path:
    """Return the root of all folders of agentspec: ``$AGENTSPEC_CACHE``, or ``agentspec`` in the user's cache.

    A relative ``$XDG_CACHE_HOME`` is ignored, as the XDG specification says.

    Raises:
        CacheError: for a user without a home directory.
    """
    try:
        if named := os.environ.get(CACHE_VARIABLE):
            return Path(named).expanduser().absolute()
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        cache = cache if cache.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:  # a user without a home
        raise CacheError(f"There is no home directory; set {CACHE_VARIABLE} to a folder of your own.") from error
    if not cache.is_absolute():
        raise CacheError(
            f"The home directory {cache.parent} is relative; set {CACHE_VARIABLE} to a folder of your own."
        )
    return cache / "agentspec"


def own_folder(folder: Path) -> Path:
    """Return a folder of the user's own; make it and missing folders above it with mode 0700.

    Raises:
        CacheError: as ``check_own``, for the folder and for all between it and ``root()``.
    """
    top = _top()
    for path in (*reversed(folder.absolute().parents), folder):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
        if path == folder or path.is_relative_to(top):
            check_own(path)
    return folder


def _top() -> Path:
    """Return ``root()``, or a path that nothing lies below."""
    try:
        return root()
    except CacheError:
        return Path(os.devnull)


def check_own(folder: Path) -> None:
    """Check that no other user can change the content of a folder.

    It must belong to the user, and no other user may write to it. Folders and symbolic links on the way there must
    belong to the user or the system; others may write only to sticky ones, as /tmp is.

    Raises:
        CacheError: otherwise.
    """
    if not hasattr(os, "getuid"):  # no owners and modes to look at
        return
    *way, (path, found) = _way(folder)
    for step, passed in way:
        if problem := _problem_on_the_way(passed):
            raise CacheError(f"The cache folder {folder} lies below {step}, which {problem}. {_advice(step)}")
    if found.st_uid != os.getuid() or found.st_mode & _WRITE_OF_OTHERS:
        raise CacheError(
            f"The cache folder {path} must belong to you, and only you may write to it: it belongs to uid "
            f"{found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}. {_advice(path)}"
        )


def check_private(folder: Path) -> None:
    """Check that a folder is the user's own, and that no other user may enter it.

    Raises:
        CacheError: otherwise.
    """
    check_own(folder)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if hasattr(os, "getuid") and mode & 0o077:
        raise CacheError(
            f"The cache folder {folder} must be closed to others (mode 0700), and has {mode:04o}. {_advice(folder)}"
        )


def _advice(path: Path) -> str:
    return (
        f"Run `chmod 700 {path}` if it is yours and you trust what is in it, or set {CACHE_VARIABLE} to another folder."
    )


def _way(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each folder and symbolic link on the way to a folder, and the folder itself at last."""
    names, links, at = [*reversed(folder.absolute().parts[1:])], 0, Path(folder.absolute().anchor)
    yield at, at.lstat()
    while names:
        name = names.pop()
        if name == "..":
            at = at.parent
            yield at, at.lstat()
            continue
        found = (at / name).lstat()
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            target = (at / name).readlink()
            names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            yield at / name, found
            at = Path(target.anchor) if target.is_absolute() else at
        else:
            at /= name
            yield at, found


def _problem_on_the_way(found: os.stat_result) -> str | None:
    """Return what lets another user redirect the path here; None if nothing does."""
    system = (0, Path("/").stat().st_uid)  # in a container with one user, / belongs to an unmapped uid
    if found.st_uid not in (os.getuid(), *system):
        return f"belongs to uid {found.st_uid}"
    if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
        return None
    is_open = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_of_one(found.st_gid))
    return f"others may write to (mode {stat.S_IMODE(found.st_mode):04o})" if is_open else None


def _is_of_one(group: int) -> bool:
    """Whether a group is root's or the user's alone: many systems give each user one, and make it writable."""
    import grp  # not available on Windows
    import pwd

    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return group == 0 or (found.gr_name == user.pw_name and not {*found.gr_mem} - {user.pw_name})
