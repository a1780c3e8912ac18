"""Feeds native kernels numbers and sizes that a model never shows, and compares what they find with numpy.

Run by ``test_native_fuzz.py`` on libraries that were built with sanitizers: every array lies in memory of its own that
ends where it ends, at an odd address, so that a sanitizer sees each read or write outside. Prints how many results were
compared, by kernel, as JSON; the case at hand is the last line of stderr.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCK = 32  # columns of a weight that share scales
GREATEST, LEAST = np.finfo(np.float32).max, np.float32(1e-45)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SIZES = (0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 2049)
KINDS = ("normal", "equal", "denormal", "huge", "inf", "-inf", "nan", "payload", "infs", "mixed")

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]


class Memory:
    """Arrays that end where their memory ends, until they are freed."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng, self._held = rng, []

    def of(self, array: Array) -> Array:
        """A copy of an array, at an odd multiple of its items' size."""
        array = np.ascontiguousarray(array)
        shift = array.itemsize * int(self._rng.choice([0, 1, 3, 5, 7]))
        at = libc.malloc(array.nbytes + shift)
        self._held.append(at)
        if not array.nbytes:
            return array
        buffer = (ctypes.c_char * array.nbytes).from_address(at + shift)
        placed = np.frombuffer(buffer, dtype=array.dtype).reshape(array.shape)
        placed[...] = array
        return placed

    def free(self) -> None:
        for at in self._held:
            libc.free(at)
        self._held = []


def address(array: Array | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None or not array.nbytes else array.ctypes.data)


class Fuzz:
    """One library and what was compared so far."""

    def __init__(self, path: str, seed: int) -> None:
        self.library = ctypes.CDLL(path)
        self.rng = np.random.default_rng(seed)
        self.memory = Memory(self.rng)
        self.panel: int = self.library.panel_rows()
        self.counts: Counter[str] = Counter()

    def case(self, kernel: str, *what: object) -> None:
        self.memory.free()
        self._case = f"{kernel} {what}"
        print(self._case, file=sys.stderr, flush=True)
        self._kernel = kernel

    def expect(self, holds: Any, *what: object) -> None:
        self.counts[self._kernel] += 1
        if not np.all(holds):
            raise AssertionError(f"{self._case}: {what}")

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self.library, name)
        function.restype = ctypes.c_bool
        given = [address(x) if x is None or isinstance(x, np.ndarray) else x for x in arguments]
        given = [ctypes.c_int64(x) if type(x) is int else x for x in given]
        if not function(*given) and name in (
            "draw",
            "race",
            "top_k",
            "top_p",
            "product",
            "attention",
            "pass",
            "layers",
        ):
            raise MemoryError(self._case)

    def numbers(self, kind: str, *shape: int) -> Array:
        """Float32 of one kind; of "mixed", some of each."""
        rng = self.rng
        normal = rng.standard_normal(shape).astype(np.float32) * 5
        if kind == "normal":
            return normal
        payload = np.array([0x7FC00001, 0x7F800001, 0xFFC001FF], dtype=np.uint32).view(np.float32)
        options: dict[str, list[float]] = {
            "equal": [1.5],
            "denormal": [LEAST, -LEAST, 1e-39, 0.0, -0.0],
            "huge": [GREATEST, -GREATEST, 1e38, -3e37],
            "infs": [np.inf, -np.inf],
            "mixed": [np.inf, -np.inf, np.nan, LEAST, GREATEST, -GREATEST, 0.0, -0.0, 1.0, -1.0],
        }
        if kind in options:
            return rng.choice(np.array(options[kind], dtype=np.float32), shape)
        some = payload if kind == "payload" else np.array([float(kind)], dtype=np.float32)
        share = rng.choice([0.02, 0.3, 1.0])
        found: Array = np.where(rng.random(shape) < share, rng.choice(some, shape), normal)
        return found.astype(np.float32)

    # Rows of scores and distributions

    def draws(self) -> None:
        for size, kind, threads in itertools.product(
            SIZES, ("dense", "sparse", "denormal", "one", "none", "nan"), (1, 3)
        ):
            rows = int(self.rng.integers(0, 5))
            self.case("draws", size, kind, rows, threads)
            probs = self.probs(kind, rows, size)
            uniforms = self.rng.choice([0.0, 1 - 2.0**-53, 0.5, *self.rng.random(4)], rows)
            keys = self.rng.integers(0, 2**64, rows, dtype=np.uint64)
            tokens = np.full(rows, -7)
            placed, found = self.memory.of(probs), self.memory.of(tokens)
            self.call("draw", placed, rows, size, self.memory.of(uniforms), found, ctypes.c_int(threads))
            for row, u, token in zip(probs.astype(np.float64), uniforms, found, strict=True):
                self.expect(self.is_drawn(row, u, int(token)), "draw", u, token)
            found = self.memory.of(tokens)
            self.call("race", placed, rows, size, self.memory.of(keys), found, ctypes.c_int(threads))
            for row, key, token in zip(probs.astype(np.float64), keys, found, strict=True):
                self.expect(self.is_winner(row, key, int(token)), "race", key, token)

    def probs(self, kind: str, rows: int, size: int) -> Array:
        probs = self.rng.random((rows, size)).astype(np.float32) ** 8
        if kind == "sparse":
            probs[self.rng.random(probs.shape) < 0.9] = 0
        elif kind == "denormal":
            probs = self.rng.choice(np.array([0, LEAST, 1e-39], dtype=np.float32), probs.shape)
        elif kind == "one":
            probs[:] = 0
            if size:
                probs[np.arange(rows), self.rng.integers(0, size, rows)] = 1
        elif kind in ("none", "nan"):
            probs[:] = 0 if kind == "none" else np.nan
        return probs

    @staticmethod
    def is_drawn(probs: Array, u: float, token: int) -> bool:
        total = probs.sum()
        if not total > 0:
            return token == 0
        before = probs[:token].sum()
        return bool(probs[token] > 0 and before - 1e-9 * total <= u * total <= before + probs[token] + 1e-9 * total)

    @staticmethod
    def is_winner(probs: Array, key: np.uint64, token: int) -> bool:
        if not probs.size or np.isnan(probs).any() or not probs.any():
            return token == 0
        with np.errstate(over="ignore", divide="ignore"):
            x = key + (np.arange(len(probs), dtype=np.uint64) + np.uint64(1)) * GOLDEN
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
            times = -np.log(((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52) / probs
        return bool(times[token] <= times.min() * (1 + 1e-12))

    def filters(self) -> None:
        for size, kind, threads in itertools.product(SIZES, KINDS, (1, 3)):
            rows = int(self.rng.integers(1, 5))
            scores = self.numbers(kind, rows, size)
            placed = self.memory.of(scores)
            ks = self.rng.choice(
                [1.0, 2.0, 5.0, max(1, size - 1), max(1, size), size + 1.0, 0.0, -1.0, np.nan, 1e300], rows
            )
            shares = self.rng.choice([0.0, 1e-300, 0.3, 0.9, 1 - 1e-9, 1.0, np.nan], rows)
            for name, options, check in (("top_k", ks, self.is_top_k), ("top_p", shares, self.is_top_p)):
                self.case("filters", name, size, kind, options.tolist(), threads)
                placed, found = self.memory.of(scores), self.memory.of(np.full(rows, 7, dtype=np.float32))
                self.call(name, placed, rows, size, self.memory.of(options), found, ctypes.c_int(threads))
                for row, option, least in zip(scores, options, found, strict=True):
                    self.expect(check(row, option, float(least)), option, least)

    @staticmethod
    def is_top_k(scores: Array, k: float, least: float) -> bool:
        known = np.sort(scores[scores > -np.inf])[::-1]
        return least == (known[int(k) - 1] if 1 <= k <= len(known) else -np.inf)

    @staticmethod
    def is_top_p(scores: Array, share: float, least: float) -> bool:
        known = scores[~np.isnan(scores)].astype(np.float64)
        if not known.size or not np.isfinite(known.max()):
            return least == (known.max() if known.size else -np.inf)
        if np.isnan(scores).any() or np.isnan(share):
            return least <= known.max()
        masses = np.exp(np.maximum(known - known.max(), -1e4))
        wanted, above, kept = share * masses.sum(), masses[known > least].sum(), masses[known >= least].sum()
        return bool((known == least).any() and above <= wanted * (1 + 1e-5) + 1e-30 and kept >= wanted * (1 - 1e-5))

    def best(self) -> None:
        for size, kind, threads in itertools.product(SIZES, KINDS, (1, 3)):
            rows, step = int(self.rng.integers(0, 4)), size + int(self.rng.integers(0, 5))
            self.case("best", size, kind, rows, step, threads)
            scores = self.numbers(kind, rows, step)
            flat = scores.reshape(-1)[: max(0, (rows - 1) * step + size)]  # nothing behind the last row
            found = self.memory.of(np.full(rows, -7))
            self.call("best", self.memory.of(flat), rows, size, step, found, ctypes.c_int(threads))
            for row, token in zip(scores[:, :size], found, strict=True):
                is_none = not size or np.isnan(row).any() or not (row > -np.inf).any()
                self.expect(token == (-1 if is_none else int(np.argmax(row))), token)

    # Vectors

    def vectors(self) -> None:
        lanes = self.library.lanes()
        for kind in (*KINDS, "range"):
            self.case("vectors", "exponential", kind)
            x = -np.abs(self.numbers(kind, 64 * lanes)) if kind != "range" else -np.linspace(0, 100, 256 * lanes)
            x = x.astype(np.float32)
            found = self.memory.of(np.full_like(x, 7))
            self.call("vectors_exponential", self.memory.of(x), found, x.size)
            with np.errstate(invalid="ignore"):
                expected = np.where(x < -87, 0, np.exp(x.astype(np.float64)))
            self.expect(np.isnan(found) == np.isnan(x))
            with np.errstate(invalid="ignore"):
                self.expect(np.isnan(x) | (np.abs(found - expected) <= 4e-7 * expected))
        for _ in range(5):
            self.case("vectors", "transpose")
            x = self.numbers("normal", lanes, lanes)
            placed = self.memory.of(x)
            self.call("vectors_transpose", placed)
            self.expect(placed == x.T)

    # Products

    def weight(self, format: int, out: int, columns: int, kind: str = "normal") -> tuple[Array, Array]:
        """A dense weight ``[out, columns]``, float64, and the panels that hold it."""
        rng, blocks = self.rng, columns // BLOCK
        scales: list[Array] = []
        if format < 2:
            step = rng.choice(np.array([0.01, 0.5, 1e-7], dtype=np.float32), (out, blocks))
            least = rng.standard_normal((out, blocks)).astype(np.float32)
            codes = rng.integers(0, 16, (out, columns)) if format == 0 else rng.integers(-127, 128, (out, columns))
            dense = codes * np.repeat(step, BLOCK, 1).astype(np.float64)
            if format == 0:
                dense += np.repeat(least, BLOCK, 1)
                codes = codes.astype(np.uint8)
                cells, scales = codes[:, ::2] | codes[:, 1::2] << 4, [step, least]
            else:
                cells, scales = codes.astype(np.int8), [step]
        else:
            exact = self.numbers(kind, out, columns)
            if format == 2:
                cells = (exact.view(np.uint32) >> 16).astype(np.uint16)
                dense = (cells.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            elif format == 3:
                with np.errstate(over="ignore"):
                    cells = np.nan_to_num(exact.astype(np.float16), nan=1, posinf=6e4, neginf=-6e4)
                dense = cells.astype(np.float64)
            else:
                cells, dense = exact, exact.astype(np.float64)
        missing = -out % self.panel
        parts = []
        for part in (*scales, cells):
            words = np.pad(np.ascontiguousarray(part).view(np.int32), ((0, missing), (0, 0)))
            words = words.reshape(-1, self.panel, blocks, words.shape[1] // max(1, blocks))
            parts.append(words.transpose(0, 2, 3, 1))
        return dense, np.concatenate(parts, axis=2)

    def products(self) -> None:
        outs = (0, 1, self.panel - 1, self.panel, self.panel + 1, 70)
        for format, out, columns, threads in itertools.product(range(5), outs, (32, 96), (1, 3)):
            for rows in self.rng.choice([0, 1, 2, 3, 4, 5, 7, 8, 9, 17, 33, 40, 258], 3, replace=False):
                kind = str(self.rng.choice(KINDS)) if format == 4 or (format == 2 and rows < 9) else "normal"
                of_x = str(self.rng.choice(["normal", "normal", *KINDS]))
                self.case("products", format, out, columns, rows, kind, of_x, threads)
                dense, packed = self.weight(format, out, columns, kind)
                x = self.numbers(of_x, int(rows), columns)
                y = self.memory.of(np.full((rows, out), 7, dtype=np.float32))
                self.call(
                    *("product", format, self.memory.of(packed), self.memory.of(x), y),
                    *(int(rows), columns, out, ctypes.c_int(threads)),
                )
                self.same(y, *self.product(x, dense))

    @staticmethod
    def product(x: Array, dense: Array) -> tuple[Array, Array]:
        """The product, and the sum of what was added up."""
        with np.errstate(all="ignore"):
            terms = x.astype(np.float64)[:, None] * dense  # [rows, out, columns]
            return terms.sum(-1), np.abs(terms).sum(-1)

    def same(self, found: Array, expected: Array, size: Array, tolerance: float = 4e-6) -> None:
        """Equal up to rounding. Where sums leave float32, NaN is still NaN, and an infinity no finite number."""
        with np.errstate(all="ignore"):
            is_close = np.abs(found - expected) <= tolerance * size + 1e-43
            is_beyond = ~(size < 1e38)
            is_kind = np.where(np.isnan(expected), np.isnan(found), np.isfinite(expected) | ~np.isfinite(found))
            self.expect(np.where(is_beyond, is_kind, is_close))

    # Attention

    def attention(self) -> None:
        lives = (0, 1, self.panel - 1, self.panel + 1, 127, 128, 129, 255, 256, 257, 300, 515)
        for live, (heads, kv_heads), threads, _ in itertools.product(lives, ((1, 1), (4, 2), (3, 1)), (1, 3), range(4)):
            width, dim = int(self.rng.choice([1, 2, 5, 64, 65])), int(self.rng.choice([32, 64, 96]))
            batch, kind = int(self.rng.choice([0, 1, 2, 3])), str(self.rng.choice(["normal", "normal", *KINDS]))
            self.case("attention", live, heads, kv_heads, width, dim, batch, kind, threads)
            q, k, v = (
                self.strided(self.numbers("normal", batch, many, length, dim))
                for many, length in ((heads, width), (kv_heads, live), (kv_heads, live))
            )
            if batch and kind != "normal":  # of the first row: the others may not know of it
                for part in (q, k, v):
                    part[0] = self.numbers(kind, *part.shape[1:])
            mask = np.where(self.rng.random((batch, width, live)) < 0.3, -np.inf, 0).astype(np.float32)
            mask[:, : width // 3] = np.finfo(np.float32).min  # positions that see nothing
            out = self.memory.of(np.full((batch, width, heads, dim), 7, dtype=np.float32))
            placed = self.memory.of(mask)
            strides = [s // 4 for part in (q, k, v) for s in part.strides[:3]]
            sizes = (ctypes.c_int64 * 18)(*(batch, heads, kv_heads, width, live, dim, *strides, width * live, live, 0))
            self.call("attention", q, k, v, placed, out, sizes, ctypes.c_float(0.125), ctypes.c_int(threads))
            for b in range(batch):
                if b or kind in ("normal", "equal", "denormal"):
                    expected, size = attended(q[b], k[b], v[b], mask[b], 0.125)
                    self.same(out[b], expected, size, 1e-4)

    def strided(self, array: Array) -> Array:
        """The same ``[B, H, L, D]``, of which heads or positions lie side by side, with gaps between rows."""
        gap = int(self.rng.choice([0, 1, 5])) if array.size else 0
        order = (0, 2, 1, 3) if self.rng.random() < 0.5 else (0, 1, 2, 3)
        wide = np.pad(array.transpose(order), ((0, 0), (0, 0), (0, 0), (0, gap)))
        flat = wide.reshape(-1)[: wide.size - gap]  # the last row ends where memory ends
        placed = self.memory.of(flat)
        if not array.size:
            return array
        steps = np.array(wide.strides)
        view = np.lib.stride_tricks.as_strided(placed, array.transpose(order).shape, tuple(steps))
        return view.transpose(order)  # either order undoes itself

    # Layers

    def layers(self) -> None:
        for kind in (*KINDS, *["normal"] * 3):
            self.parts_of_layers(kind)
        for widths, threads, bias in itertools.product(([1], [1, 3], [17], [5, 1, 2], []), (1, 3), (False, True)):
            for window in (0, 2):
                self.whole_pass(widths, threads, bias, window)

    def parts_of_layers(self, kind: str) -> None:
        for dim in (32, 64, 96):
            self.case("layers", "parts", kind, dim)
            x, y = self.numbers(kind, dim), self.memory.of(np.full(dim, 7, dtype=np.float32))
            weight, up = self.numbers("normal", dim), self.numbers("normal", dim)
            self.call("layers_norm", self.memory.of(x), self.memory.of(weight), ctypes.c_double(1e-5), y, dim)
            wide = x.astype(np.float64)
            with np.errstate(all="ignore"):
                squares = np.mean(wide**2)
                expected = wide / np.sqrt(squares + 1e-5) * weight
                self.expect(~(squares < 1e37) | (np.abs(y - expected) <= 1e-5 * np.abs(expected) + 1e-43), "norm")
                self.call("layers_gate", self.memory.of(x), self.memory.of(up), y, dim)
                expected = wide / (1 + np.exp(-wide)) * up
                is_known = np.isfinite(wide) & (np.abs(wide) < 80)
                self.expect(~is_known | (np.abs(y - expected) <= 4e-6 * np.abs(expected) + 1e-43), "gate")
                self.expect(~np.isnan(x) | np.isnan(y), "gate of NaN")
            turned, angles = self.memory.of(x), self.rng.random(dim // 2)
            cosines, sines = (np.tile(f(angles), 2).astype(np.float32) for f in (np.cos, np.sin))
            self.call("layers_rotate", turned, self.memory.of(cosines), self.memory.of(sines), dim)
            if kind in ("normal", "equal", "denormal"):
                self.expect(np.abs(turned - rotated(wide, cosines, sines)) <= 1e-5, "rotate")

    def whole_pass(self, widths: list[int], threads: int, bias: bool, window: int) -> None:
        """Two layers from ids to logits and best tokens, in rows of a cache that are no longer than they must be."""
        rng, batch, tokens = self.rng, len(widths), sum(widths)
        dim, inner, vocab, known, heads, kv_heads, head = 64, 96, 45, 41, 4, 2, 32
        formats = [int(f) for f in rng.integers(0, 5, 5)]
        self.case("layers", "pass", widths, threads, bias, window, formats)
        starts_at = [int(s) for s in rng.integers(0, 40, batch)]
        capacity = max([s + w for s, w in zip(starts_at, widths, strict=True)], default=0)
        cache_rows = [int(r) for r in rng.permutation(batch + 1)[:batch]]
        shapes = [((heads + 2 * kv_heads) * head, dim), (dim, heads * head), (2 * inner, dim), (dim, inner)]
        held: list[Array] = []

        def hold(array: Array) -> Any:
            held.append(self.memory.of(array))
            return held[-1].ctypes.data if array.nbytes else None

        class Layer(ctypes.Structure):
            _fields_ = (
                ("weights", ctypes.c_void_p * 4),
                ("biases", ctypes.c_void_p * 4),
                ("formats", ctypes.c_int64 * 4),
                ("norms", ctypes.c_void_p * 3),
                ("eps", ctypes.c_double * 3),
                ("stores", ctypes.c_void_p * 2),
            )

        class Around(ctypes.Structure):
            _fields_ = (
                *((name, ctypes.c_void_p) for name in ("embeddings", "cosines", "sines", "norm", "bias", "head")),
                *((name, ctypes.c_int64) for name in ("format", "outputs", "known")),
                ("eps", ctypes.c_double),
            )

        described, dense_layers = (Layer * 2)(), []
        for layer in described:
            weights = [self.weight(f, *shape) for f, shape in zip(formats, shapes, strict=False)]
            biases = [rng.standard_normal(shape[0]).astype(np.float32) if bias else None for shape in shapes]
            norms = [rng.standard_normal(n).astype(np.float32) for n in (dim, dim, (heads + kv_heads) * head)]
            stores = [self.numbers("normal", batch + 1, kv_heads, capacity, head) for _ in range(2)]
            layer.weights[:] = [hold(packed) for _, packed in weights]
            layer.biases[:] = [None if b is None else hold(b) for b in biases]
            layer.formats[:] = formats[:4]
            layer.norms[:] = [hold(norms[0]), hold(norms[1]), hold(norms[2]) if bias else None]
            layer.eps[:] = [1e-5, 1e-6, 1e-6]
            layer.stores[:] = [hold(store) for store in stores]
            dense_layers.append(([d for d, _ in weights], biases, norms, stores, held[-2:]))
        embeddings, last_norm = self.numbers("normal", vocab, dim), rng.standard_normal(dim).astype(np.float32)
        head_dense, head_packed = self.weight(formats[4], vocab, dim)
        head_bias = rng.standard_normal(vocab).astype(np.float32) if bias else None
        angles = rng.random((capacity, head // 2))
        cosines, sines = (np.tile(f(angles), 2).astype(np.float32) for f in (np.cos, np.sin))
        around = Around(
            *(hold(embeddings), hold(cosines), hold(sines), hold(last_norm)),
            *(None if head_bias is None else hold(head_bias), hold(head_packed)),
            *(formats[4], vocab, known, 1e-5),
        )
        ids = rng.integers(0, vocab, tokens)
        slots = np.array([s + i for s, w in zip(starts_at, widths, strict=True) for i in range(w)], dtype=np.int64)
        asked = [int(rng.integers(0, w + 1)) for w in widths]
        starts = np.array([0, *np.cumsum(widths)], dtype=np.int64)
        width = max(widths, default=0)
        row_step = (heads + 2 * kv_heads) * head
        of_store = (kv_heads * capacity * head, capacity * head, head)
        sizes = (ctypes.c_int64 * 18)(
            *(batch, heads, kv_heads, width, capacity, head, width * row_step, head, row_step),
            *(*of_store, *of_store, 0, 0, window),
        )
        scores = self.memory.of(np.full((sum(asked), vocab), 7, dtype=np.float32))
        best = self.memory.of(np.full(sum(asked), -7))
        self.call(
            *("pass", ctypes.byref(around), described, 2, sizes, dim, inner),
            *(self.memory.of(np.array(part, dtype=np.int64)) for part in (ids, cache_rows, starts, slots, asked)),
            *(scores, best, ctypes.c_float(0.2), ctypes.c_int(threads)),
        )
        begun = 0
        for b, (s, w) in enumerate(zip(starts_at, widths, strict=True)):
            hidden = embeddings[ids[starts[b] : starts[b + 1]]].astype(np.float64)
            for dense, biases, norms, stores, placed in dense_layers:
                keys, values = (store[cache_rows[b]].astype(np.float64) for store in stores)
                hidden = decoded(
                    hidden, dense, biases, norms, keys, values, cosines, sines, s, window, bias, (heads, kv_heads, head)
                )
                for mine, store in zip((keys, values), placed, strict=True):
                    off = np.abs(store.reshape(batch + 1, kv_heads, capacity, head)[cache_rows[b]] - mine)
                    self.expect(off <= 2e-3 * (1 + np.abs(mine)), "K and V")
            logits = normed(hidden, last_norm, 1e-5) @ head_dense.T + (0 if head_bias is None else head_bias)
            mine = scores[begun : begun + asked[b]]
            wanted = logits[w - asked[b] :]
            self.expect(np.abs(mine - wanted) <= 2e-3 * (1 + np.abs(wanted).max(initial=0)), "logits")
            self.expect(best[begun : begun + asked[b]] == mine[:, :known].argmax(-1), "best")
            begun += asked[b]


def attended(q: Array, k: Array, v: Array, mask: Array, scale: float) -> tuple[Array, Array]:
    """Softmax attention ``[width, heads, dim]`` in float64, and the size of what it adds up; zeros for the blind."""
    groups = len(q) // len(k)
    k, v = (np.repeat(part.astype(np.float64), groups, 0) for part in (k, v))
    scores = np.einsum("hwd,hld->hwl", q.astype(np.float64) * scale, k) + mask
    is_blind = ~(mask > -1e30).any(-1)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e300))
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    weights[:, is_blind] = 0
    out = np.einsum("hwl,hld->whd", weights, v)
    return out, np.broadcast_to(np.abs(v).max(initial=0) + 1, out.shape)


def normed(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotated(x: Array, cosines: Array, sines: Array) -> Array:
    left, right = np.split(x, 2, -1)
    return x * cosines + np.concatenate([-right, left], -1) * sines


def decoded(
    x: Array, dense: Any, biases: Any, norms: Any, keys: Array, values: Array, cosines: Array, sines: Array, start: int,
    window: int, has_head_norm: bool, sizes: tuple[int, int, int],
) -> Array:  # fmt: skip
    """One layer over the positions ``x`` from slot ``start`` on; keys and values are written."""
    heads, kv_heads, head = sizes
    end = start + len(x)

    def project(part: int, y: Array) -> Array:
        return y @ dense[part].T + (0 if biases[part] is None else biases[part])

    states = project(0, normed(x, norms[0], 1e-5)).reshape(len(x), -1, head)
    q, k, v = np.split(states, [heads, heads + kv_heads], 1)
    if has_head_norm:
        weights = norms[2].reshape(-1, head)
        q, k = normed(q, weights[:heads], 1e-6), normed(k, weights[heads:], 1e-6)
    at = slice(start, end)
    q, k = (rotated(part, cosines[at, None], sines[at, None]) for part in (q, k))
    keys[:, at], values[:, at] = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    slots, seen = np.arange(start, end)[:, None], np.arange(end)
    is_seen = (seen <= slots) & (not window or seen > slots - window)
    mask = np.where(is_seen, 0, -np.inf)
    mixed, _ = attended(q.transpose(1, 0, 2), keys[:, :end], values[:, :end], mask, np.float32(0.2))
    x = x + project(1, mixed.reshape(len(x), -1))
    gates, ups = np.split(project(2, normed(x, norms[1], 1e-6)), 2, -1)
    with np.errstate(over="ignore"):
        return np.asarray(x + project(3, gates / (1 + np.exp(-gates)) * ups))


def main(path: str, seed: int, *kernels: str) -> None:
    np.seterr(all="ignore")  # infinities and NaN are meant
    fuzz = Fuzz(path, seed)
    known: dict[str, Callable[[], None]] = {
        name: getattr(fuzz, name) for name in ("vectors", "draws", "filters", "best", "products", "attention", "layers")
    }
    for name in kernels or known:
        known[name]()
    fuzz.memory.free()
    print(json.dumps(fuzz.counts))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
