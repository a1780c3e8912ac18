"""The schema of a run: written and read back without loss, from files that are not always whole."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from agentspec.report import SCHEMA, AgentRun, RunRecord, read_runs, schema
from agentspec.stats import StepStats

seconds = st.floats(0, 1e6)


def model_of(kind: type[BaseModel], depth: int = 2) -> st.SearchStrategy[Any]:
    """Instances of a part of the schema, every field set; agents within tools down to a depth."""
    fields = kind.model_fields.keys() - {"schema_version"}
    return st.builds(kind, **{name: _field(name, kind, depth) for name in fields})


def _field(name: str, kind: type[BaseModel], depth: int) -> st.SearchStrategy[Any]:
    counts = st.integers(0, 10**9)
    parts: dict[str, tuple[type[BaseModel], int]] = {
        "theory": (schema.Theory, 0),
        "gain": (schema.Gain, 0),
        "step": (schema.Step, 0),
        "phases": (schema.Phases, 0),
        "other_samples": (schema.Step, 1),
        "models": (schema.ModelCall, 2),
        "tools": (schema.ToolCall, 1),
        "iterations": (schema.Iteration, 2),
        "drafters": (schema.DrafterCounts, 2),
        "verify_costs": (schema.VerifyCost, 2),
    }
    if name in parts:
        part, most = parts[name]
        if part in (schema.Iteration, schema.ToolCall) and depth == 0:
            return st.just([])
        made = model_of(part, depth - (kind is schema.ToolCall or part is schema.ToolCall))
        if name in ("drafters", "verify_costs"):
            keys = st.text(max_size=5) if name == "drafters" else st.integers(1, 40)
            return st.dictionaries(keys, made, max_size=most)
        return st.lists(made, max_size=most) if most else st.none() | made
    if name == "accepted_lengths":
        return st.dictionaries(st.integers(1, 40), counts, max_size=3)
    if name == "remarks":
        return st.tuples(st.text(max_size=8))
    if name == "plain_pass_from":
        return st.sampled_from([*get_args(schema.PassSource), None])
    if name in ("estimated", "same_tokens", "streamed", "cached"):
        return st.booleans()
    if name in ("name", "provider", "id", "node", "error", "finish_reason", "tool_call_id", "baseline"):
        return st.text(max_size=8)
    is_count = name.endswith(("tokens", "calls", "_saved")) or name in ("rounds", "rejections", "drafted", "accepted")
    return counts if is_count else seconds


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(model_of(RunRecord))
def test_a_run_is_read_back_without_loss(record: RunRecord) -> None:
    run = AgentRun(record)
    told = json.loads(json.dumps(run.to_dict()))
    assert told == run.to_dict()
    assert told["schema"] == SCHEMA
    assert AgentRun.from_dict(told).record == record
    assert RunRecord.model_validate_json(record.model_dump_json()) == record


def test_every_field_says_what_it_is() -> None:
    for kind in (schema.RunRecord, schema.Iteration, schema.ModelCall, schema.ToolCall, schema.Gain, schema.Phases):
        assert kind.__doc__
        obvious = {"schema_version", "name", "iterations", "tools", "drafters", "target_calls", "acceptance_rate"}
        obvious |= {"seconds", "finish_reason"}
        for name, field in kind.model_fields.items():
            assert field.description or name in obvious, f"{kind.__name__}.{name}"


EMPTY = {"began_at": 1.0, "total_s": 1.0, "model_s": 0.0, "tool_s": 0.0, "framework_s": 1.0, "idle_s": 1.0}


def run(name: str) -> AgentRun:
    return AgentRun(RunRecord(name=name, **EMPTY))


def test_runs_are_appended_and_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for name in ("a", "b\n", "é"):
        run(name).append_to(path)
    runs, problems = read_runs(path)
    assert [found.name for found in runs] == ["a", "b\n", "é"]
    assert problems == []


def test_what_can_be_read_is_read_and_the_rest_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    whole = RunRecord(name="whole", **EMPTY).model_dump_json()
    newer = whole.replace(SCHEMA, "agentspec.run/2")
    lines = [whole, "nonsense", newer, "", "[1]", whole.replace('"total_s":1.0', '"total_s":"x"'), whole, whole[:40]]
    path.write_text("\n".join(lines))
    runs, problems = read_runs(path)
    assert [found.name for found in runs] == ["whole", "whole"]
    assert [problem.split(":")[0] for problem in problems] == ["line 2", "line 3", "line 5", "line 6", "line 8"]
    for problem, reason in zip(problems, ("not JSON", "run/2", "no run", "total_s", "cut off"), strict=True):
        assert reason in problem
    run("later").append_to(path)  # a line that was cut off does not swallow the next one
    assert [found.name for found in read_runs(path)[0]] == ["whole", "whole", "later"]


def test_an_empty_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b"")
    assert read_runs(path) == ([], ["there is no run: the file is empty"])
    path.write_bytes(b"\xff\xfe\n")
    assert read_runs(path) == ([], ["line 1: not JSON"])
    with pytest.raises(FileNotFoundError):
        read_runs(tmp_path / "missing.jsonl")


def test_what_is_no_run_is_refused() -> None:
    for wrong in ({}, {"schema": SCHEMA}, {"schema": "agentspec.run/2", **EMPTY}, {**EMPTY, "total_s": math.nan}):
        with pytest.raises(ValidationError):
            AgentRun.from_dict(wrong)


def test_fields_of_a_later_day_are_ignored() -> None:
    assert AgentRun.from_dict({"schema": SCHEMA, "mood": "good", **EMPTY}).total_s == 1.0


def test_names_types_and_defaults_are_those_of_version_1() -> None:
    """A step's dict has the fields of ``Step``; the schema without its prose is the one that was published."""

    def without_prose(value: Any) -> Any:
        if isinstance(value, list):
            return [without_prose(one) for one in value]
        if not isinstance(value, dict):
            return value
        prose = ("description", "title")
        return {key: without_prose(one) for key, one in value.items() if key not in prose or isinstance(one, dict)}

    published = "002edd50ff735666796bd961bcd6664e5fbc00045d136eb9ed8a5b392a482ba3"
    text = json.dumps(without_prose(RunRecord.model_json_schema()), sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == published
    assert StepStats().to_dict().keys() == schema.Step.model_fields.keys()
