"""Check the files of a local checkpoint before transformers reads them: which are there, whole, and well formed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentspec.errors import ModelLoadError
from agentspec.models.config_fields import END_TOKENS, check_config, check_layers

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"

_LONGEST_HEADER = 100_000_000  # bytes, as safetensors has it
_LENGTH_BYTES = 8
_SHOWN = 3


def check_checkpoint(name_or_path: str, gguf_file: str | None, allow_pickle: bool) -> None:
    """Check a local checkpoint; what may be the name of a hub repository passes.

    Raises ``ModelLoadError`` naming the file, for one that is missing, cut off, pickled, or holds something else.
    """
    folder = Path(name_or_path).expanduser()
    looks_local = name_or_path.startswith((".", "~", os.sep)) or name_or_path.count("/") > 1
    if not folder.exists():
        if looks_local:
            raise ModelLoadError(
                f"{name_or_path}: no such directory; expected one with config.json and *.safetensors, or a hub name "
                "such as 'owner/model'"
            )
        return
    if not folder.is_dir():
        raise ModelLoadError(
            f"{name_or_path}: expected a directory, found a file; name its directory (and gguf_file, for a GGUF)"
        )
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise ModelLoadError(f"{name_or_path}: expected the GGUF file {gguf_file} in it, found none")
        return
    config = _check_configs(folder)
    check_layers(str(folder / CONFIG), config, _check_weights(folder, allow_pickle))


def _check_configs(folder: Path) -> dict[str, Any]:
    """Check both configs; the first one comes back."""
    if not (folder / CONFIG).exists():
        raise ModelLoadError(f"{folder}: expected config.json in it, found none")
    config = read_object(folder / CONFIG)
    check_config(str(folder / CONFIG), config)
    if (folder / GENERATION_CONFIG).exists():
        generation = read_object(folder / GENERATION_CONFIG)
        END_TOKENS.check(str(folder / GENERATION_CONFIG), END_TOKENS.name, generation.get(END_TOKENS.name))
    return config


def _check_plain(path: Path) -> None:
    """Raise ``ModelLoadError`` for what is no plain file: to open a pipe waits for a writer, without an end."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ModelLoadError(f"{path}: expected a plain file; it cannot be read: {one_line(error)}") from error
    if not stat.S_ISREG(mode):
        found = "a directory" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
        raise ModelLoadError(f"{path}: expected a plain file, found {found}")


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raise ``ModelLoadError`` for one that cannot be read or holds anything else."""
    _check_plain(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: expected a JSON object; it cannot be read: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def _check_weights(folder: Path, allow_pickle: bool) -> list[str]:
    """Check the files of weights; the names of the weights come back, as far as a header or an index has them."""
    if not allow_pickle and not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        found = f"only pickled weights ({', '.join(pickled)}), which can run code when read" if pickled else "none"
        raise ModelLoadError(
            f"{folder}: expected *.safetensors weights, found {found}; "
            "convert them, or pass allow_pickle=True if you trust their source"
        )
    if (folder / WEIGHTS).exists():
        return check_safetensors(folder / WEIGHTS)
    if (folder / f"{WEIGHTS}.index.json").exists():
        return _check_index(folder / f"{WEIGHTS}.index.json")
    if allow_pickle and (folder / PICKLED).exists():
        _check_plain(folder / PICKLED)
    elif allow_pickle and (folder / f"{PICKLED}.index.json").exists():
        return list(_shards(folder / f"{PICKLED}.index.json"))
    return []


def _check_index(index: Path) -> list[str]:
    """Check an index of safetensors, and the shards that it names; the names of their weights come back."""
    places = _shards(index)
    held = {name for shard in sorted(set(places.values())) for name in check_safetensors(index.parent / shard)}
    if absent := sorted(places.keys() - held):
        raise ModelLoadError(
            f"{index}: it names {listed(absent, 'weight')} that no shard holds; fetch the checkpoint again"
        )
    return sorted(held)


def _shards(index: Path) -> dict[str, str]:
    """Return the file of each weight, as an index names them; every file is there."""
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ModelLoadError(f"{index}: expected a weight_map from names of weights to names of files")
    files = sorted(set(places.values()))
    if strange := [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise ModelLoadError(f"{index}: it names {listed(strange, 'file')} outside of its own folder")
    if absent := [name for name in files if not (index.parent / name).exists()]:
        raise ModelLoadError(
            f"{index}: it names {listed(absent, 'file')} not found beside it; fetch the checkpoint again"
        )
    for name in files:
        _check_plain(index.parent / name)
    return places


def check_safetensors(path: Path) -> list[str]:
    """Return the names of the tensors in a file, by its header.

    Raises ``ModelLoadError`` for a file that is none of safetensors, or not as long as its header says.
    """
    _check_plain(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            header = stream.read(length) if len(start) == _LENGTH_BYTES and length <= _LONGEST_HEADER else b""
    except OSError as error:
        raise ModelLoadError(f"{path}: expected a safetensors file; it cannot be read: {one_line(error)}") from error
    if len(start) < _LENGTH_BYTES or len(header) < length <= _LONGEST_HEADER:
        raise ModelLoadError(f"{path}: it is cut off within its header ({size} bytes); fetch it again")
    tensors = _tensors(path, start, header)
    ends = [entry["data_offsets"][1] for entry in tensors.values()]
    expected = _LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        raise ModelLoadError(
            f"{path}: expected {expected} bytes, as its header says, found {size}: it is cut off or damaged; "
            "fetch it again"
        )
    return list(tensors)


def _tensors(path: Path, start: bytes, header: bytes) -> dict[str, dict[str, Any]]:
    """Return the entries of a header, without its metadata."""
    try:
        entries: dict[str, Any] = json.loads(header)
        tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        if all(all(isinstance(end, int) for end in entry["data_offsets"][:2]) for entry in tensors.values()):
            return tensors
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    kind = "a pointer of Git LFS (git lfs pull fetches the file)" if start == b"version " else "something else"
    raise ModelLoadError(f"{path}: expected a safetensors file, found {kind}")


def one_line(error: BaseException) -> str:
    """Return an error's message in one printable line; a bare key or index is preceded by the error's type."""
    text = " ".join(str(error).split())
    printable = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    is_bare = isinstance(error, LookupError) or not printable
    return f"{type(error).__name__}: {printable}" if is_bare else printable


def listed(names: Sequence[str], noun: str) -> str:
    """Names in words: how many they are, and the first few."""
    return f"{len(names)} {noun}{'s' * (len(names) != 1)} ({shown(names)})"


def shown(names: Sequence[str]) -> str:
    """Return the first few of some names."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def mismatches(report: Mapping[str, Any]) -> list[str]:
    """Each weight of another shape in a report of transformers, with both shapes."""
    return sorted(f"{name} {list(found)} for {list(expected)}" for name, found, expected in report["mismatched_keys"])
