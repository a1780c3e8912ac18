"""The script for a machine with a GPU runs at toy size, without what such a machine lacks, and its checks can fail."""

from __future__ import annotations

import copy
import itertools
import json
import math
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tape import TapeRecorder
from torch import Tensor

from agentspec import CausalLM, speculative, theory
from agentspec.acceptance import Verification
from agentspec.models import Logits
from agentspec.models.fusion import fused_modules
from agentspec.models.pass_cost import PassCost
from agentspec.rng import Role, SequenceRng
from agentspec.stats import StepStats

TESTS = Path(__file__).resolve().parents[1]
FOLDER = TESTS.parent / "examples" / "benchmark"
LACKING = (
    *("pydantic", "jsonschema", "diskcache", "llguidance", "outlines", "outlines_core", "gguf"),
    *("langchain", "langchain_core", "langgraph"),
)
RUN = (
    "import runpy, sys\n"
    f"sys.modules.update(dict.fromkeys({LACKING!r}))\n"  # None: no such package
    f"runpy.run_path({str(FOLDER / 'gpu.py')!r}, run_name='__main__')"
)


@pytest.fixture(scope="module")
def parts() -> Iterator[Any]:
    """The modules of ``gpu_parts``, as attributes of the package."""
    sys.path.insert(0, str(FOLDER))
    try:
        import gpu_parts
        import gpu_parts.checks
        import gpu_parts.page
        import gpu_parts.timing

        yield gpu_parts
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def pair(parts: Any) -> tuple[Any, Any]:
    """A small model, and itself in a wider and deeper one."""
    small = parts.models.random_model(parts.models.TOY.draft, parts.models.TOY.vocabulary, "cpu", torch.float32)
    return small, parts.models.Widened(small, parts.models.TOY.target)


def test_all_of_it_runs_at_toy_size_without_the_packages_of_the_other_rooms(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, "--toy", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert (result["schema"], result["toy"]) == ("agentspec.gpu/1", True)
    nothing_to_see = [f["name"] for f in result["checks"] if f["holds"] is None]
    expected = itertools.product(("float32", "bfloat16"), (3, 1))
    assert nothing_to_see == [f"captured passes score as launched ones ({t}, {n} layers)" for t, n in expected]
    assert [f["holds"] for f in result["checks"] if f["holds"] is not None] == [True] * 10
    speed = result["speed"]
    assert set(speed) == {"setup", "outside_kernels", "ways", "formula", "goals"}
    assert abs(speed["setup"]["overlap_on_random_text"] - 0.8) < 0.05
    played = {(way["batch"], way["way"]): way for way in speed["ways"]}
    ours = ["agentspec plain", "agentspec gamma 2", "agentspec gamma 4", "agentspec gamma auto"]
    expected = {(batch, way) for batch in (1, 4, 8) for way in [*ours, "transformers generate"]}
    assert set(played) == expected | {(1, "transformers assisted")}
    assert all(way["ms_per_token"] > 0 for way in played.values())
    assert {(f["batch"], f["gamma"]) for f in speed["formula"]} == {(b, g) for b in (1, 4, 8) for g in (2, 4)}
    assert all(0 < share["outside"] < 1 for share in speed["outside_kernels"])
    assert len(speed["goals"]) == 4
    assert (tmp_path / "gpu.txt").read_text() == done.stdout


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match="not found: transformers"):
        runpy.run_path(str(FOLDER / "gpu.py"))


# --- the large model that computes what the small one does -----------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_without_noise_the_widened_model_gives_the_scores_of_the_small_one(parts: Any, eps: float) -> None:
    scale = parts.models.TOY
    small = parts.models.random_model(replace(scale.draft, eps=eps), scale.vocabulary, "cpu", torch.float32)
    wide = parts.models.Widened(small, scale.target).model
    ids = torch.randint(scale.vocabulary, (3, 40), generator=torch.Generator().manual_seed(0))
    expected, found = small(input_ids=ids).logits, wide(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert 2 < expected.std() < 4  # neither flat nor sure
    assert sum(p.numel() for p in wide.parameters()) > 2 * sum(p.numel() for p in small.parameters())


def test_noise_moves_the_distribution_as_far_as_is_asked(parts: Any, pair: tuple[Any, Any]) -> None:
    small, wide = pair
    noise = {alpha: parts.models.search_noise(wide, small, alpha)[0] for alpha in (0.9, 0.5)}
    assert noise[0.9] < noise[0.5]
    ids = torch.randint(small.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(7))
    assert parts.models.overlap(wide.model, small, ids) == pytest.approx(0.5, abs=0.05)
    with pytest.raises(ValueError, match="between 0 and 1"):
        parts.models.search_noise(wide, small, 1.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"hidden": 16}, "no smaller"), ({"head_dim": 32}, "heads of 16"), ({"kv_heads": 4}, "2 query heads per K/V")],
)
def test_a_shape_that_the_small_model_does_not_fit_into_is_refused(
    parts: Any, pair: tuple[Any, Any], wrong: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parts.models.Widened(pair[0], replace(parts.models.TOY.target, **wrong))


def test_a_token_reads_all_weights_but_the_table_of_embeddings(parts: Any, pair: tuple[Any, Any]) -> None:
    small, _ = pair
    table = small.config.vocab_size * small.config.hidden_size
    assert parts.models.weight_bytes(small) == 4 * (sum(p.numel() for p in small.parameters()) - table)


# --- checks can fail -------------------------------------------------------------------------------------------------


def test_another_function_is_reported(parts: Any, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    small, wide = pair
    assert parts.checks.same_function(wide, small).holds
    monkeypatch.setattr(wide, "set_noise", lambda noise: type(wide).set_noise(wide, 0.01))
    assert not parts.checks.same_function(wide, small).holds


def test_a_wrong_cache_is_reported(parts: Any, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    small, _ = pair
    model = CausalLM(small)
    finding, wobble = parts.checks.cached_logits(model)
    assert finding.holds
    assert wobble < 1e-4
    right = CausalLM.next_logits
    monkeypatch.setattr(CausalLM, "next_logits", lambda *arguments: Logits(right(*arguments).values + 0.1))
    finding, wobble = parts.checks.cached_logits(model)
    assert not finding.holds
    assert wobble == pytest.approx(0.1, abs=1e-3)


def test_captured_passes_that_are_wrong_or_never_replayed_are_reported(
    parts: Any, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check, model = parts.checks.captured_passes, CausalLM(pair[0])
    assert check(model, CausalLM(pair[0])).holds is None
    captured = CausalLM(pair[0])
    captured._forward.capture_with(TapeRecorder())
    found = check(model, captured)
    assert found.holds
    assert captured.replayed_passes >= 4
    monkeypatch.setattr(CausalLM, "replayed_passes", 0)
    assert not check(model, captured).holds
    monkeypatch.undo()
    monkeypatch.setattr(Tensor, "copy_", lambda self, *_, **__: self)  # every replay is of the table before
    assert not check(model, captured).holds


def test_texts_that_depend_on_speculation_are_reported(
    parts: Any, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small, wide = pair
    wide.set_noise(0.1)
    target, draft = CausalLM(wide.model), CausalLM(small)
    assert parts.checks.equal_texts(target, draft, 1.0, 12).holds
    monkeypatch.setitem(speculative.VERIFY, "coupled", _believing)
    assert not parts.checks.equal_texts(target, draft, 1.0, 12).holds


def _believing(p: Tensor, draft: Any, rng: SequenceRng) -> Verification:
    """Accepts every drafted token."""
    n = draft.drafted.long().sum(-1)
    return Verification(n, rng.draw(p[torch.arange(len(p)), n], Role.TARGET, n))


def test_greedy_texts_may_part_at_ties_only(parts: Any, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    small, _ = pair
    model = CausalLM(small)
    logits = model.next_logits([[1, 2, 3, 4]], [1]).values[0, 0]
    first, second = logits.topk(2).indices.tolist()
    gap = float(logits[first] - logits[second])
    plain, other = (4, first, 0), (4, second, 9)
    found = {0: [plain], 1: [plain], 4: [other], 8: [plain]}
    monkeypatch.setattr(parts.checks, "texts", lambda *_: ([[1, 2, 3]], found))
    assert parts.checks.margins(model, model, 3, wobble=gap / 3.9).holds
    finding = parts.checks.margins(model, model, 3, wobble=gap / 4.1)
    assert not finding.holds
    assert "1 of 3 texts differ" in finding.detail


def test_a_draw_that_hits_what_has_no_mass_is_reported(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts.checks.zero_mass(500, "cpu").holds

    def draw(self: SequenceRng, probs: Tensor, role: Role, offsets: Tensor) -> Tensor:
        cumulative = probs.double().cumsum(-1)
        cumulative = cumulative / cumulative[:, -1:]
        return torch.searchsorted(cumulative, self.uniform(role, offsets, edges=cumulative)[:, None])[:, 0]

    monkeypatch.setattr(SequenceRng, "draw", draw)
    assert not parts.checks.zero_mass(500, "cpu").holds


def test_slivers_of_a_rounded_sum_are_reported(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Tensor.cumsum

    def rounded(self: Tensor, dim: int) -> Tensor:
        return right(self, dim) + 1e-12 * (torch.arange(self.shape[dim]) // 64 % 2)

    monkeypatch.setattr(Tensor, "cumsum", rounded)
    finding = parts.checks.zero_mass(500, "cpu")
    assert not finding.holds
    assert "0 slivers" not in finding.detail


def test_a_wrong_distribution_is_reported(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts.checks.enumeration(TESTS, "cpu", 0.0).holds
    verify = speculative.verify
    monkeypatch.setitem(speculative.VERIFY, "rejection", lambda p, draft, rng: verify(p**1.01, draft, rng))
    assert parts.checks.enumeration(TESTS, "cpu", 0.0).holds is False


def test_an_enumeration_that_is_not_there_is_skipped_and_said(parts: Any, tmp_path: Path) -> None:
    finding = parts.checks.enumeration(tmp_path, "cpu", 0.0)
    assert finding.holds is None
    assert str(finding).startswith("skipped ")


def test_a_check_that_breaks_off_does_not_hold_and_ends_nothing(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no kernel for this")

    for name in ("zero_mass", "cached_logits", "enumeration"):
        monkeypatch.setattr(parts.checks, name, broken)
    findings = list(parts.checks.all_findings(parts.models.TOY, "cpu", TESTS, 0.0))
    assert [finding.holds for finding in findings] == [False, False, True, True, False, True, False]
    assert "no kernel for this" in str(findings[0])


# --- timing ----------------------------------------------------------------------------------------------------------


def _timed(parts: Any, seconds: list[float], way: str = "agentspec gamma 2", **counts: int) -> Any:
    stats = StepStats(new_tokens=counts.get("new", 0), rounds=counts.get("rounds", 0), rejections=counts.get("no", 0))
    stats.accepted["model"] = counts.get("yes", 0)
    return parts.timing.Timed(way, 1, 10, seconds, [stats])


def test_gain_is_compared_with_the_paper_at_the_measured_alpha_and_costs(parts: Any) -> None:
    plain = _timed(parts, [1.0, 4.0, 9.0], "agentspec plain", new=10, rounds=10)
    fast = _timed(parts, [0.5, 1.0, 3.0], new=10, rounds=4, yes=6, no=2)
    target = PassCost({(1, 1): 0.010, (1, 3): 0.012})
    found = parts.timing.formula(fast, plain, 2, target, PassCost({(1, 1): 0.001}))
    assert (found.alpha, found.c, found.v) == (0.75, pytest.approx(0.1), pytest.approx(1.2))
    assert found.paper == pytest.approx(theory.walltime_improvement(0.75, 2, 0.1))
    assert found.paper_v == pytest.approx(theory.walltime_improvement(0.75, 2, 0.1, 1.2))
    assert found.measured == 3.0
    assert parts.timing.formula(plain, plain, 2, target, target) is None


def test_time_per_token_leaves_out_the_prompt_only_where_a_round_is_a_token(parts: Any) -> None:
    plain = _timed(parts, [1.0], new=10, rounds=10)
    plain.stats[0].total_s, plain.stats[0].ttft_s = 1.0, 0.1
    assert plain.ms_per_token == pytest.approx(100)
    assert plain.decode_ms_per_token == pytest.approx(100)
    plain.stats[0].ttft_s = 0.55
    assert plain.decode_ms_per_token == pytest.approx(50)
    assert _timed(parts, [1.0], new=10, rounds=4).decode_ms_per_token is None


def test_the_seconds_of_overlapping_kernels_count_once(parts: Any) -> None:
    assert parts.timing.covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert parts.timing.covered([]) == 0


def test_a_way_of_transformers_that_fails_is_told_and_one_of_ours_raises(parts: Any) -> None:
    def broken(prompts: list[list[int]], tokens: int) -> tuple[int, list[StepStats]]:
        raise TypeError("no such argument")

    def right(prompts: list[list[int]], tokens: int) -> tuple[int, list[StepStats]]:
        return tokens * len(prompts), []

    def race(**ways: Any) -> list[Any]:
        named: list[Any] = parts.timing.race(
            {name.replace("_", " "): play for name, play in ways.items()}, 2, 8, 50, 3, lambda: math.inf
        )
        return named

    good, bad = race(agentspec_plain=right, transformers_generate=broken)
    assert (len(good.seconds), good.error) == (3, None)
    assert (len(bad.seconds), bad.error) == (0, "TypeError: no such argument")
    page = parts.page.Page()
    page.tell_batch([good, bad])
    assert "failed: TypeError" in page.text()
    assert parts.page.row(bad, good)["error"] == bad.error
    with pytest.raises(TypeError):
        race(agentspec_plain=broken)
    with pytest.raises(RuntimeError, match="emitted 0 tokens, expected 4"):
        race(agentspec_plain=lambda prompts, tokens: (0, []))


def test_repeats_end_with_the_time_but_one_is_played(parts: Any) -> None:
    ways = {"agentspec plain": lambda prompts, tokens: (tokens * len(prompts), [])}
    assert len(parts.timing.race(ways, 1, 8, 50, 5, lambda: -1.0)[0].seconds) == 1


def test_fused_copies_score_as_the_model_that_stays_for_transformers(parts: Any, pair: tuple[Any, Any]) -> None:
    plain, fused = pair[0], parts.models.fused(pair[0])
    assert fused_modules(fused.model) > 0 == fused_modules(plain)
    finding = parts.checks.fused_scores(fused, plain)
    assert finding.holds, finding
    assert parts.checks.fused_scores(CausalLM(copy.deepcopy(plain)), plain).holds is False  # nothing is fused
    with torch.no_grad():
        next(fused.model.parameters()).mul_(1.01)
    assert parts.checks.fused_scores(fused, plain).holds is False


def test_a_failed_check_is_the_status(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(FOLDER / "gpu.py"))
    wrong = parts.checks.Finding("a check", False, "wrong")
    monkeypatch.setattr(parts.checks, "all_findings", lambda *_: iter([wrong]))
    monkeypatch.setitem(script["main"].__globals__, "speed", lambda *_: iter([("setup", {})]))
    assert script["main"](["--toy", "--out", str(tmp_path)]) is False
    assert json.loads((tmp_path / "gpu.json").read_text())["checks"][0]["holds"] is False
    with pytest.raises(SystemExit):
        script["main"](["--alpha", "2"])


def test_what_was_measured_outlives_what_fails(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def speed(*_: Any) -> Iterator[tuple[str, Any]]:
        yield "setup", {"noise": 1}
        raise RuntimeError("out of memory")

    script = runpy.run_path(str(FOLDER / "gpu.py"))
    monkeypatch.setattr(parts.checks, "all_findings", lambda *_: iter([]))
    monkeypatch.setitem(script["main"].__globals__, "speed", speed)
    with pytest.raises(RuntimeError, match="out of memory"):
        script["main"](["--toy", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "gpu.json").read_text())["speed"] == {"setup": {"noise": 1}}
