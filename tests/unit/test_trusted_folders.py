"""Folders of the cache: only those that no other user could have written to, or lead elsewhere."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentspec.errors import CacheError
from agentspec.runtime.paths import CACHE_VARIABLE, check_own, check_private, own_folder, root

ME = os.getuid()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the cache, which is not there yet."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "above" / "cache"))
    return tmp_path / "above" / "cache"


def refused(folder: Path, match: str = "") -> str:
    with pytest.raises(CacheError, match=match) as caught:
        own_folder(folder)
    assert CACHE_VARIABLE in str(caught.value)
    return str(caught.value)


def owned_by(monkeypatch: pytest.MonkeyPatch, owners: dict[Path, int]) -> None:
    """Let some folders and links belong to other users."""
    lstat = Path.lstat

    def changed(path: Path) -> os.stat_result:
        found = lstat(path)
        fields = list(found)
        fields[4] = owners.get(path, found.st_uid)
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", changed)


@pytest.mark.parametrize("value", ["relative", "./cache", "../cache", "~/cache", ""])
def test_a_relative_xdg_folder_is_ignored(value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert root() == tmp_path / ".cache" / "agentspec"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert root() == tmp_path / "other" / "agentspec"


def test_a_relative_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "somewhere")
    with pytest.raises(CacheError, match="is relative"):
        root()
    monkeypatch.setenv(CACHE_VARIABLE, "~no-such-user-at-all/cache")
    with pytest.raises(CacheError, match="no home directory"):
        root()


def test_folders_are_made_for_the_user_alone(cache: Path) -> None:
    before = os.umask(0o002)  # as many systems have it
    try:
        made = own_folder(cache / "kernels")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (made, cache, cache.parent)] == [0o700] * 3
    assert own_folder(made) == made
    check_private(made)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o722, 0o1777, 0o1770])
@pytest.mark.parametrize("part", ["", "kernels"])
def test_a_folder_that_others_may_write_to_is_refused(part: str, mode: int, cache: Path) -> None:
    own_folder(cache / "kernels")
    (cache / part).chmod(mode)
    assert f"{cache / part} must belong to you" in refused(cache / "kernels", "only you may write to it")


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o711])
def test_a_folder_that_others_may_read_is_the_users_own(mode: int, cache: Path) -> None:
    own_folder(cache).chmod(mode)
    assert own_folder(cache) == cache
    with pytest.raises(CacheError, match="closed to others"):
        check_private(cache)


@pytest.mark.parametrize("part", ["", "kernels"])
@pytest.mark.parametrize("other", [ME + 1, 0 if ME else 1])
def test_a_folder_of_another_user_is_refused(
    part: str, other: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_folder(cache / "kernels")
    owned_by(monkeypatch, {cache / part: other})
    refused(cache / "kernels", f"belongs to uid {other}")


@pytest.mark.parametrize(
    ("mode", "taken"), [(0o755, True), (0o1777, True), (0o1775, True), (0o777, False), (0o757, False)]
)
def test_what_leads_to_the_cache_may_be_sticky_but_not_open(mode: int, taken: bool, cache: Path) -> None:
    own_folder(cache)
    cache.parent.chmod(mode)
    if taken:
        own_folder(cache)
    else:
        assert str(cache.parent) in refused(cache, "others may write to")


def test_what_leads_to_the_cache_may_be_open_to_the_users_own_group(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_folder(cache)
    cache.parent.chmod(0o775)
    me = SimpleNamespace(pw_name="me")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: me)
    group = SimpleNamespace(gr_name="me", gr_mem=["me"])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    own_folder(cache)
    if os.getgid() == 0:
        return  # root's group is the system's
    for other in (SimpleNamespace(gr_name="me", gr_mem=["you"]), SimpleNamespace(gr_name="users", gr_mem=[])):
        monkeypatch.setattr(grp, "getgrgid", lambda gid, found=other: found)
        refused(cache, "others may write to")


def test_what_leads_to_the_cache_is_the_users_or_the_systems(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folder(cache)
    owned_by(monkeypatch, {cache.parent: 0})
    own_folder(cache)
    owned_by(monkeypatch, {cache.parent: ME + 7})
    refused(cache, f"lies below {cache.parent}, which belongs to uid {ME + 7}")


def test_links_are_followed_and_judged(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = own_folder(tmp_path / "real" / "cache")
    cache.parent.mkdir()
    cache.symlink_to(Path("..") / "real" / "cache")
    own_folder(cache / "kernels")
    assert (real / "kernels").is_dir()
    real.parent.chmod(0o777)
    refused(cache, "others may write to")
    real.parent.chmod(0o700)
    real.chmod(0o777)
    refused(cache, "only you may write to it")
    real.chmod(0o700)
    owned_by(monkeypatch, {cache: ME + 7})
    refused(cache, f"{cache}, which belongs to uid {ME + 7}")


def test_links_that_lead_nowhere_are_errors_of_the_system(cache: Path) -> None:
    cache.parent.mkdir()
    cache.symlink_to(cache)
    with pytest.raises(OSError, match="cache"):
        own_folder(cache / "kernels")
    with pytest.raises(OSError, match="cache"):
        check_own(cache)
    cache.unlink()
    cache.write_text("a file")
    with pytest.raises(OSError, match="cache"):
        own_folder(cache / "kernels")
