"""Where agentspec keeps files, and who may enter."""

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
    """The folder of everything that agentspec keeps: ``$AGENTSPEC_CACHE``, or ``agentspec`` in the user's cache.

    A relative ``$XDG_CACHE_HOME`` is ignored, as the XDG specification says. Raises ``CacheError`` for a user without a
    home.
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
    """Return a folder of the user's own, made with mode 0700 where it is missing, as all above it that are.

    Raises ``CacheError`` as ``check_own`` does: for the folder, and for all that lies between it and ``root()``.
    """
    top = _top()
    for path in (*reversed(folder.absolute().parents), folder):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
        if path == folder or path.is_relative_to(top):
            check_own(path)
    return folder


def _top() -> Path:
    """``root()``, or a place that nothing lies below."""
    try:
        return root()
    except CacheError:
        return Path(os.devnull)


def check_own(folder: Path) -> None:
    """Raise ``CacheError`` where another user could change what is found in a folder.

    It belongs to the user, and nobody else may write to it. Whatever is passed on the way there, folders and symbolic
    links, belongs to the user or the system; others may write only to what is sticky, as /tmp is.
    """
    if not hasattr(os, "getuid"):  # no owners and modes to look at
        return
    *way, (path, found) = _way(folder)
    for step, passed in way:
        if problem := _problem_on_the_way(passed):
            raise CacheError(f"The cache folder {folder} lies behind {step}, which {problem}. {_advice(step)}")
    if found.st_uid != os.getuid() or found.st_mode & _WRITE_OF_OTHERS:
        raise CacheError(
            f"The cache folder {path} must belong to you, and only you may write to it: it belongs to uid "
            f"{found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}. {_advice(path)}"
        )


def check_private(folder: Path) -> None:
    """Raise ``CacheError`` for a folder that is not the user's own, or that others may enter."""
    check_own(folder)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if hasattr(os, "getuid") and mode & 0o077:
        raise CacheError(
            f"The cache folder {folder} must be closed to others (mode 0700), and has {mode:04o}. {_advice(folder)}"
        )


def _advice(path: Path) -> str:
    return (
        f"Say `chmod 700 {path}` if it is yours and you trust what is in it, or set {CACHE_VARIABLE} to another folder."
    )


def _way(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each folder and symbolic link that is passed on the way to a folder, and the folder itself at last."""
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
    """What lets another user lead the way elsewhere; None where nothing does."""
    system = (0, Path("/").stat().st_uid)  # in a container of one user, / is another's who is nobody there
    if found.st_uid not in (os.getuid(), *system):
        return f"belongs to uid {found.st_uid}"
    if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
        return None
    is_open = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_of_one(found.st_gid))
    return f"others may write to (mode {stat.S_IMODE(found.st_mode):04o})" if is_open else None


def _is_of_one(group: int) -> bool:
    """Whether a group is root's, or that of the user alone: many systems give each user one, and make it writable."""
    import grp  # here, for there is none on Windows
    import pwd

    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return group == 0 or (found.gr_name == user.pw_name and not {*found.gr_mem} - {user.pw_name})
