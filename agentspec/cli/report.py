"""``agentspec report``: summarise files of runs, compare two of them, and write views of a single run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentspec.errors import InvalidRequestError
from agentspec.report import AgentRun, read_runs
from agentspec.report.compare import Comparison, Percentiles, compare, percentiles
from agentspec.runtime.visible import visible

SCHEMA = "agentspec.report/1"


@dataclass(frozen=True)
class _File:
    path: Path
    runs: list[AgentRun]
    problems: list[str]

    @property
    def percentiles(self) -> list[Percentiles]:
        return percentiles([run.record for run in self.runs])


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("a", type=Path, help="file of runs, as run.append_to(path) writes it")
    parser.add_argument("b", type=Path, nargs="?", help="file of other runs, to compare with")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write one run of A as a page")
    parser.add_argument("--trace", type=Path, metavar="OUT", help="write one run of A as a trace for Perfetto")
    parser.add_argument("--run", type=int, metavar="N", help="which run --html and --trace write, from 1; the last one")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 if a file holds no readable run, 2 if it is not JSON at all.

    Raises:
        OSError: for a file that cannot be opened or written.
        InvalidRequestError: for a run number that does not exist.
    """
    files = [_File(path, *read_runs(path)) for path in (arguments.a, arguments.b) if path is not None]
    comparison = None
    if len(files) == 2 and all(file.runs for file in files):
        a, b = ([run.record for run in file.runs] for file in files)
        comparison = compare(a, b)
    if arguments.json:
        print(json.dumps(_as_json(files, comparison), indent=2))
    else:
        print(visible("\n\n".join(_summary(file) for file in files), lines=True))
        if comparison is not None:
            print(visible(f"\n{_comparison_table(files, comparison)}", lines=True))
    _write(files[0], arguments)
    empty = [file for file in files if not file.runs]
    if any(all(problem.endswith("not JSON") for problem in file.problems) for file in empty):
        return 2
    return 1 if empty else 0


def _write(file: _File, arguments: argparse.Namespace) -> None:
    """Write the views of one run."""
    if not file.runs or (arguments.html is None and arguments.trace is None):
        return
    number = len(file.runs) if arguments.run is None else arguments.run
    if not 1 <= number <= len(file.runs):
        count = len(file.runs)
        raise InvalidRequestError(f"{file.path} holds {count} runs that can be read; there is no run {number}.")
    chosen = file.runs[number - 1]
    if arguments.html is not None:
        chosen.to_html(arguments.html)
    if arguments.trace is not None:
        chosen.to_chrome_trace(arguments.trace)
    if not arguments.json:
        written = [str(path) for path in (arguments.html, arguments.trace) if path is not None]
        print(f"\nRun {number} of {len(file.runs)} written: {visible(', '.join(written))}")


def _summary(file: _File) -> str:
    """Return the percentiles of a file's runs, and what is wrong with its other lines."""
    count = len(file.runs)
    lines = [f"{visible(file.path)}: {count} run{'' if count == 1 else 's'}"]
    lines += [f"  not read, {visible(problem)}" for problem in file.problems]
    if file.runs:
        rows = [(p.name, f"{p.count}", *map(_seconds, (p.p50, p.p90, p.p99))) for p in file.percentiles]
        lines += _columns([("seconds", "runs", "p50", "p90", "p99"), *rows])
    return "\n".join(lines)


def _comparison_table(files: Sequence[_File], comparison: Comparison) -> str:
    a, b = (file.path for file in files)
    how = "not paired: the numbers of runs differ"
    if comparison.paired_by is not None:
        how = f"{min(len(file.runs) for file in files)} pairs, by {comparison.paired_by}"
    rows = [
        (
            ratio.name,
            f"{ratio.count}",
            _seconds(ratio.a),
            _seconds(ratio.b),
            "-" if ratio.ratio is None else f"{ratio.ratio:.3f}",
            "-" if ratio.low is None or ratio.high is None else f"{ratio.low:.3f} to {ratio.high:.3f}",
        )
        for ratio in comparison.ratios
    ]
    head = ("seconds", "n", "A p50", "B p50", "A / B", f"{comparison.confidence:.0%} interval")
    intro = f"A is {a}, B is {b}: {how}\nA / B is a geometric mean, above 1 B is faster; {comparison.method}"
    return "\n".join([intro, *_columns([head, *rows])])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out a table: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _as_json(files: Sequence[_File], comparison: Comparison | None) -> dict[str, object]:
    summaries = [
        {
            "path": str(file.path),
            "runs": len(file.runs),
            "problems": file.problems,
            "percentiles": [{**asdict(p), "name": p.name.strip()} for p in file.percentiles],
        }
        for file in files
    ]
    compared = None
    if comparison is not None:
        ratios = [{**asdict(ratio), "name": ratio.name.strip()} for ratio in comparison.ratios]
        compared = {**comparison.to_dict(), "ratios": ratios}
    return {"schema": SCHEMA, "files": summaries, "comparison": compared}


def _seconds(value: float) -> str:
    return f"{value:.4f}"
