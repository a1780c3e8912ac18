"""Our own kernels (``native/``), compiled once by the C++ compiler of the machine and kept in the cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentspec.errors import CacheError
from agentspec.models.switches import Switch
from agentspec.runtime.digests import is_intact, move, seal
from agentspec.runtime.paths import check_own, own_folder, root

_SOURCES = Path(__file__).with_name("src")
_COMPILERS = ("g++", "c++")  # Clang's OpenMP is another than torch's
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp")
_INSTRUCTIONS = {"AVX512": ("-mavx512f", "-mfma"), "AVX2": ("-mavx2", "-mfma")}  # by what torch says of the processor
_PATIENCE_S = 120.0

BLOCK = 32
"""Columns of a weight that share scales; an attention head has a multiple of it."""

Sizes = ctypes.c_int64 * 18
"""Of ``attention.h``'s Attention."""


class KernelsMissingError(Exception):
    """There are no kernels here; says why."""


class Kernels:
    """The compiled functions.

    Args:
        library: of ``native/``. It takes its threads from the OpenMP that torch has loaded, and so shares them.

    Attributes:
        panel_rows: rows of a weight that lie together.
        version: tells these kernels from others.
    """

    def __init__(self, library: ctypes.CDLL, version: str) -> None:
        self._library = library
        self.panel_rows: int = library.panel_rows()
        self.version = version
        addresses, sizes = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 3
        self.product = self.function("product", ctypes.c_int64, *addresses[:3], *sizes, ctypes.c_int)
        """Format, addresses of weights, x and y, then rows of x, columns of x, columns of y, threads."""
        self._attention = self.function(
            "attention", *addresses, ctypes.POINTER(ctypes.c_int64), ctypes.c_float, ctypes.c_int
        )
        rows = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
        self._draw, self._race = self.function("draw", *rows), self.function("race", *rows)
        self._top_k, self._top_p = self.function("top_k", *rows), self.function("top_p", *rows)

    def function(self, name: str, *arguments: type[Any]) -> Callable[..., None]:
        """Return a function of the library by its name and argument types; calling it may raise ``MemoryError``."""
        found = getattr(self._library, name)
        found.argtypes, found.restype, found.errcheck = arguments, ctypes.c_bool, _check_memory
        function: Callable[..., None] = found
        return function

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        """``softmax(scale query key^T + mask) value``, float32 on a CPU: ``[B, F, H, D]``.

        ``query`` is ``[B, H, F, D]``, ``key`` and ``value`` are ``[B, H_kv, L, D]``, ``mask`` is ``[B, 1, F, L]``; the
        numbers of their last dimensions lie together.
        """
        batch, heads, width, dim = query.shape
        kv_heads, live = key.shape[1:3]
        shape, is_whole = (batch, kv_heads, live, dim), dim % BLOCK == 0 and kv_heads > 0 and heads % kv_heads == 0
        if key.shape != shape or value.shape != shape or not is_whole:
            raise ValueError(
                f"Expected keys and values [B, H_kv, L, D] for queries [B, H, F, D], with H a multiple of H_kv and D "
                f"one of {BLOCK}; got {[*key.shape]}, {[*value.shape]} and {[*query.shape]}."
            )
        mask = mask.expand(batch, 1, width, live)
        for tensor in (query, key, value, mask):
            _check(tensor, torch.float32, lies_together=True)
        strides = *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], mask.stride(0), mask.stride(2)
        sizes = Sizes(batch, heads, kv_heads, width, live, dim, *strides, 0)
        out = query.new_empty(batch, width, heads, dim)
        self._attention(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), mask.data_ptr(), out.data_ptr(), sizes, scale,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def draw(self, probs: Tensor, uniforms: Tensor) -> Tensor:
        """Return each row's first token whose cumulative mass is above ``uniforms`` ``[N]`` of the whole.

        They are float32, uniforms float64 in [0, 1), both on a CPU; ``[N]``. 0 for a row that is NaN, or has no mass.
        """
        return _for_rows(self._draw, probs, _check(uniforms, torch.float64), torch.long)

    def race(self, probs: Tensor, keys: Tensor) -> Tensor:
        """Return each row's winner of a race in which token i needs ``-log(noise) / probs[i]``: ``[N]``.

        The noise of a token is a hash of it and of ``keys`` ``[N]`` (int64), as in ``CoupledRng``. 0 for a row that is
        NaN.
        """
        return _for_rows(self._race, probs, _check(keys, torch.long), torch.long)

    def least_of_top_k(self, logits: Tensor, counts: Sequence[float]) -> Tensor:
        """Return the k-th largest logit of each row ``[N, V]`` (float32, on a CPU): ``[N]``."""
        return _for_rows(self._top_k, logits, torch.tensor(counts, dtype=torch.float64, device="cpu"), torch.float32)

    def least_of_top_p(self, logits: Tensor, shares: Sequence[float]) -> Tensor:
        """Return the least of the largest logits of each row ``[N, V]`` that hold a share of its mass: ``[N]``."""
        return _for_rows(self._top_p, logits, torch.tensor(shares, dtype=torch.float64, device="cpu"), torch.float32)


def _for_rows(function: Callable[..., None], rows: Tensor, options: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply a kernel to each row ``[N, V]`` and its option ``[N]``; return its results ``[N]``."""
    if rows.dim() != 2 or options.shape != rows.shape[:1]:
        raise ValueError(f"Expected rows [N, V] and an option for each, got {[*rows.shape]} and {[*options.shape]}.")
    rows, options = _check(rows, torch.float32).contiguous(), options.contiguous()
    found = torch.empty(len(rows), dtype=dtype, device="cpu")
    function(rows.data_ptr(), *rows.shape, options.data_ptr(), found.data_ptr(), torch.get_num_threads())
    return found


def _check(tensor: Tensor, dtype: torch.dtype, lies_together: bool = False) -> Tensor:
    """Return the tensor, whose address is passed on. Raise ``TypeError`` for one that the kernels cannot read."""
    is_apart = lies_together and tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1
    if tensor.dtype != dtype or not tensor.is_cpu or is_apart:
        raise TypeError(
            f"Kernels read {dtype} on a CPU{', whose last dimension lies together' if lies_together else ''}; got "
            f"{tensor.dtype} on {tensor.device} with strides {tensor.stride()}."
        )
    return tensor


def _check_memory(has_memory: bool, function: Any, arguments: Any) -> None:
    if not has_memory:
        raise MemoryError("Out of memory for what the kernels compute in between; shorten prompts, or prefill_chunk.")


def kernels() -> Kernels:
    """Return the kernels of this process; compiling them, where they are not cached, takes seconds.

    Raises:
        KernelsMissingError: without a C++ compiler, with one that fails, or on a processor they are not written for.
    """
    found = _kernels()
    if isinstance(found, Kernels):
        return found
    raise KernelsMissingError(found)


def kernels_for(numbers: Tensor) -> Kernels | None:
    """Return the kernels for float32 on a CPU, where a model with native kernels has loaded them already.

    They are those of the process. Draws are the same as without them; distributions differ by rounding: top-p adds up
    shares in float64 where torch does so in float32.
    """
    if not numbers.is_cpu or numbers.dtype != torch.float32 or not _kernels.cache_info().currsize:
        return None
    found = _kernels()
    return found if isinstance(found, Kernels) else None


def compiles(wanted: Switch) -> bool:
    """Whether products are to be compiled here: as wanted, or (``"auto"``) where there is a compiler.

    One warning where that compiler fails; where there is none, ``tune`` warns a caller that demands them.
    """
    if wanted is False:
        return False
    found = _kernels()
    if isinstance(found, Kernels):
        return True
    if wanted == "auto" and sys.platform == "linux" and _compiler() is not None:
        warnings.warn(
            "Products could not be compiled, decoding will be slower (native_kernels=False does without them, and "
            f"without a warning); results are the same: {found}",
            RuntimeWarning,
            stacklevel=3,
        )
    return False


@functools.cache
def _kernels() -> Kernels | str:
    """Load once; return the kernels or the reason they are unavailable."""
    try:
        return _found()
    except KernelsMissingError as error:
        return str(error)
    except (OSError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def _found() -> Kernels:
    compiler = _compiler()
    if sys.platform != "linux" or compiler is None:
        raise KernelsMissingError(f"there is no C++ compiler (looked for $CXX, {', '.join(_COMPILERS)}, on Linux)")
    command = (*compiler, *_FLAGS, *_instructions())
    texts = [path.read_bytes() for path in sorted(_SOURCES.iterdir()) if path.suffix in (".h", ".cpp")]
    version = hashlib.sha256(b"\0".join([*texts, *map(str.encode, command)])).hexdigest()[:32]
    return Kernels(_library(command, version), version)


def _library(command: tuple[str, ...], version: str) -> ctypes.CDLL:
    """Return the library that ``command`` makes, from the cache where it is there and intact."""
    with suppress(CacheError):  # a user without a home
        folder = root() / "kernels"
        try:
            scratch = Path(tempfile.mkdtemp(dir=own_folder(folder)))
        except CacheError as error:
            warnings.warn(f"The kernels are compiled anew in every process. {error}", RuntimeWarning, stacklevel=2)
        except OSError:  # a file system that is full or read-only, where an intact library may lie
            kept = folder / f"{version}.so"
            with suppress(OSError):
                check_own(folder)
                if is_intact(_manifest(kept), kept.name):
                    return ctypes.CDLL(str(kept))
        else:
            try:
                return _kept(command, folder / f"{version}.so", scratch)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    with tempfile.TemporaryDirectory() as elsewhere:  # what cannot be kept is made for this process
        return ctypes.CDLL(str(_build(command, Path(elsewhere))))


def _kept(command: tuple[str, ...], kept: Path, scratch: Path) -> ctypes.CDLL:
    """Return the library ``kept``, made in ``scratch`` where it is not intact; one that does not load is not kept.

    Two processes that make it at once both move a whole library into place. Should they differ, the next process finds
    the digest of the other one, and makes it anew.
    """
    if is_intact(_manifest(kept), kept.name):
        with suppress(OSError):  # for another system
            return ctypes.CDLL(str(kept))
    built = _build(command, scratch)
    library = ctypes.CDLL(str(built))
    with suppress(OSError):
        built = built.replace(scratch / kept.name)
        seal(_manifest(built), [built])
        move(built, kept)
        move(_manifest(built), _manifest(kept))
    return library


def _manifest(library: Path) -> Path:
    return library.with_suffix(".digests.json")


def _build(command: tuple[str, ...], folder: Path) -> Path:
    """Build the library in ``folder``, linked without an OpenMP: torch's is there, and two would have two teams."""
    compiled, linked = folder / "kernels.o", folder / "kernels.so"
    linker = command[: len(command) - len(_FLAGS) - len(_instructions())]
    steps: list[list[str | Path]] = [
        [*command, "-c", _SOURCES / "kernels.cpp", "-o", compiled],
        [*linker, "-shared", compiled, "-o", linked],
    ]
    for step in steps:
        try:
            subprocess.run(step, check=True, capture_output=True, text=True, timeout=_PATIENCE_S)
        except subprocess.CalledProcessError as error:
            raise KernelsMissingError(f"{command[0]} failed: {error.stderr.strip()[-500:]}") from error
        except subprocess.TimeoutExpired as error:
            raise KernelsMissingError(f"{command[0]} took longer than {_PATIENCE_S:.0f} s") from error
    return linked


def _compiler() -> tuple[str, ...] | None:
    """Return the words that begin a compiler's command."""
    named = shlex.split(os.environ.get("CXX", ""))
    names = [named] if named else [[name] for name in _COMPILERS]
    return next(((found, *rest) for name, *rest in names if (found := shutil.which(name))), None)


def _instructions() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() in ("aarch64", "arm64"):
        return ()
    for name, flags in _INSTRUCTIONS.items():
        if capability.startswith(name):
            return flags
    expected = " nor ".join(_INSTRUCTIONS)
    raise KernelsMissingError(f"the processor has neither {expected} ({platform.machine()}, {capability})")
