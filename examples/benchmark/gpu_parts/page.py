"""What is printed, and kept to be written: the tables of ``gpu.py``."""

from __future__ import annotations

from typing import Any

from gpu_parts.timing import AUTO, GENERATE, LAUNCHED, PLAIN, Formula, Share, Timed


class Page:
    """What was printed so far."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def tell(self, line: str) -> None:
        """Print a line, and keep it."""
        print(line, flush=True)
        self._lines.append(line)

    def text(self) -> str:
        """All that was told."""
        return "\n".join(self._lines) + "\n"

    def tell_setup(self, setup: dict[str, Any]) -> None:
        """The models, the floor, and what a pass costs."""
        self.tell(
            f"\ntarget {setup['target_weights'] / 1e9:.3g} billion weights, draft {setup['draft_weights'] / 1e9:.3g}, "
            f"{setup['dtype']}; noise {setup['noise']:.3g} gives an overlap of {setup['overlap_on_random_text']:.1%}"
        )
        self.tell(
            f"floor {setup['floor_ms']:.3f} ms a token: {setup['bytes_per_pass'] / 1e9:.3g} GB at "
            f"{setup['copy_bytes_per_s'] / 1e12:.3g} TB/s"
        )
        self.tell("\nrows width  target ms   draft ms")
        for cost in setup["pass_ms"]:
            self.tell(f"{cost['rows']:4d} {cost['width']:5d} {cost['target']:10.3f} {cost['draft']:10.3f}")

    def tell_shares(self, shares: list[Share]) -> None:
        """Of a round, what is no kernel."""
        self.tell("\nbatch 1                  round ms  kernels ms  outside kernels")
        for share in shares:
            if share.kernel_ms is None or share.outside is None:
                self.tell(f"{share.way:24s} {share.round_ms:8.3f}  the profiler saw no kernel")
            else:
                self.tell(f"{share.way:24s} {share.round_ms:8.3f} {share.kernel_ms:11.3f} {share.outside:16.1%}")

    def tell_batch(self, timed: list[Timed]) -> None:
        """The ways at one batch."""
        plain = next(t for t in timed if t.way == PLAIN)
        self.tell(f"\nbatch {plain.batch}, {plain.tokens} tokens     ms/token  tokens/s  x plain   alpha  tokens/round")
        for t in timed:
            if t.error is not None:
                self.tell(f"{t.way:24s} failed: {t.error}")
                continue
            alpha = "" if t.alpha is None else f"{t.alpha:.1%}"
            length = "" if t.tokens_per_round is None else f"{t.tokens_per_round:.2f}"
            rate = 1000 * t.batch / t.ms_per_token
            self.tell(f"{t.way:24s} {t.ms_per_token:8.3f} {rate:9.1f} {t.times(plain):8.2f} {alpha:>7s} {length:>13s}")

    def tell_formulas(self, formulas: list[Formula]) -> None:
        """The paper's gain beside the measured one."""
        self.tell("\nbatch gamma   alpha      c      v   paper  paper, v   measured  of paper  of paper, v")
        for f in formulas:
            self.tell(
                f"{f.batch:5d} {f.gamma:5d} {f.alpha:7.1%} {f.c:6.3f} {f.v:6.3f} {f.paper:7.2f} {f.paper_v:9.2f} "
                f"{f.measured:10.2f} {f.measured / f.paper:9.0%} {f.measured / f.paper_v:12.0%}"
            )

    def tell_goals(self, found: list[dict[str, Any]]) -> None:
        """What was reached of the figures that are wanted."""
        self.tell("\nbatch 1, as a ratio")
        for goal in found:
            verdict = "reached" if goal["reached"] else "missed"
            self.tell(f"{goal['name']:50s} {goal['value']:6.2f}, wanted {goal['wanted']:.2f}: {verdict}")


def row(timed: Timed, plain: Timed) -> dict[str, Any]:
    """A way at a batch, as data."""
    if timed.error is not None:
        return {"way": timed.way, "batch": timed.batch, "error": timed.error}
    return {
        "way": timed.way,
        "batch": timed.batch,
        "ms_per_token": timed.ms_per_token,
        "decode_ms_per_token": timed.decode_ms_per_token,
        "tokens_per_s": 1000 * timed.batch / timed.ms_per_token,
        "times_plain": timed.times(plain),
        "alpha": timed.alpha,
        "tokens_per_round": timed.tokens_per_round,
        "seconds": timed.seconds,
    }


def goals(timed: dict[tuple[int, str], Timed], floor_ms: float) -> list[dict[str, Any]]:
    """The figures to reach at batch 1, and what was reached; ``best`` of ours is the fastest speculative way."""
    plain, theirs = timed[1, PLAIN], timed[1, GENERATE]
    ours = [
        t
        for (batch, way), t in timed.items()
        if batch == 1 and way.startswith("agentspec") and way not in (PLAIN, LAUNCHED)
    ]
    best = min(ours, key=lambda t: t.ms_per_token)
    over_floor = (plain.decode_ms_per_token or plain.ms_per_token) / floor_ms
    auto = timed[1, AUTO].times(plain)
    found = [
        _goal("plain decoding over the floor", over_floor, 1.3, over_floor <= 1.3),
        _goal(f"{best.way} against plain", best.times(plain), 2.5, best.times(plain) >= 2.5),
        _goal("gamma auto against plain", auto, 0.97, auto >= 0.97),
    ]
    if theirs.error is None:
        over_theirs = best.times(theirs)
        found.append(_goal(f"{best.way} against {theirs.way}", over_theirs, 6.0, over_theirs >= 6.0))
    return found


def _goal(name: str, value: float, wanted: float, reached: bool) -> dict[str, Any]:
    return {"name": name, "value": value, "wanted": wanted, "reached": reached}
