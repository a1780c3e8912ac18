"""Files of runs: JSON Lines, a run a line, appended to and read back."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from agentspec.report.schema import SCHEMA, RunRecord


def append(record: RunRecord, path: Path) -> None:
    """Write a run at the end of a file, which is made where it is missing. A line that was cut off there is ended."""
    line = record.model_dump_json().encode() + b"\n"
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


def read(path: Path) -> tuple[list[RunRecord], list[str]]:
    """Read the runs in a file, and what is wrong with its other lines, each by its number."""
    records: list[RunRecord] = []
    problems: list[str] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(RunRecord.model_validate_json(line))
        except ValidationError as error:
            problems.append(f"line {number}: {_reason(line, error)}")
    if not records and not problems:
        problems.append("there is no run: the file is empty")
    return records, problems


def _reason(line: bytes, error: ValidationError) -> str:
    """Why a line is no run."""
    try:
        value = json.loads(line)
    except ValueError:
        return "cut off in the middle" if line.lstrip().startswith(b"{") else "not JSON"
    if not isinstance(value, dict) or "schema" not in value:
        return f"JSON, but no run: expected an object with schema {SCHEMA!r}"
    if value["schema"] != SCHEMA:
        return f"a run of schema {value['schema']!r}; expected {SCHEMA!r}"
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
