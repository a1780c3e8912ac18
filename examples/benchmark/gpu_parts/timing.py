"""Seconds per token, plain and speculative, beside transformers, the limit of the memory, and the paper's formula."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from agentspec import Batch, CausalLM, LocalEngine, ModelDrafter, Request, SamplingParams, Sequence, theory
from agentspec import SpeculativeDecoder as Decoder
from agentspec.draft_length import Auto
from agentspec.models.pass_cost import PassCost
from agentspec.stats import StepStats

PLAIN, AUTO = "agentspec plain", "agentspec gamma auto"
LAUNCHED = "agentspec plain, not captured"
GENERATE, ASSISTED = "transformers generate", "transformers assisted"
PROMPT = 32
"""Tokens of a prompt; every repeat has other ones, or a cache would know them."""

Clock = Callable[[], float]


@dataclass
class Timed:
    """One way to decode, at one batch: a repeat's seconds at each place, and agentspec's own count."""

    way: str
    batch: int
    tokens: int
    """Tokens of each text."""
    seconds: list[float] = field(default_factory=list)
    stats: list[StepStats] = field(default_factory=list)
    error: str | None = None
    """Why it was given up."""

    @property
    def ms_per_token(self) -> float:
        """Milliseconds from one token of a text to its next, prompt included; a median."""
        return 1000 * statistics.median(self.seconds) / self.tokens

    @property
    def decode_ms_per_token(self) -> float | None:
        """The same without the prompt and the first token, where agentspec counted and a round is a token."""
        if not self.stats or any(s.rounds != s.new_tokens for s in self.stats):
            return None
        return 1000 * statistics.median((s.total_s - s.ttft_s) / (s.new_tokens - 1) for s in self.stats)

    @property
    def alpha(self) -> float | None:
        """Accepted drafted tokens over those that were judged: the paper's alpha; None without drafts."""
        accepted, rejected = (sum(getattr(s, n) for s in self.stats) for n in ("accepted_tokens", "rejections"))
        return accepted / (accepted + rejected) if accepted + rejected else None

    @property
    def tokens_per_round(self) -> float | None:
        """Emitted tokens per pass of the target and row."""
        rounds = sum(s.rounds for s in self.stats)
        return sum(s.new_tokens for s in self.stats) / rounds if rounds else None

    def times(self, other: Timed) -> float:
        """How many times faster than ``other``; the median over repeats."""
        return statistics.median(slow / fast for slow, fast in zip(other.seconds, self.seconds, strict=False))


Play = Callable[[list[list[int]], int], tuple[int, list[StepStats]]]
"""Prompts and tokens to emit behind each, to the tokens emitted and what was counted."""


def engine_way(engine: LocalEngine) -> Play:
    """Sampling at temperature 1 by an engine."""

    def play(prompts: list[list[int]], tokens: int) -> tuple[int, list[StepStats]]:
        requests = [
            Request(p, SamplingParams(seed=i, max_tokens=tokens), acceptance="rejection") for i, p in enumerate(prompts)
        ]
        done = [samples[0] for samples in engine.generate(requests)]
        return sum(len(c.tokens) for c in done), [c.stats for c in done]

    return play


def transformers_way(target: PreTrainedModel, draft: PreTrainedModel | None, gamma: int) -> Play:
    """Sampling at temperature 1 by transformers' ``generate``; with a draft, assisted."""

    def play(prompts: list[list[int]], tokens: int) -> tuple[int, list[StepStats]]:
        options: dict[str, Any] = {}
        if draft is not None:
            settings: Any = draft.generation_config
            settings.num_assistant_tokens = gamma
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0
            options["assistant_model"] = draft
        ids = torch.tensor(prompts, device=target.device)
        module: Any = target
        with torch.inference_mode():
            found = module.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=tokens,
                **options,
            )
        return int(found[:, ids.shape[1] :].cpu().numel()), []

    return play


def race(ways: dict[str, Play], batch: int, tokens: int, vocabulary: int, repeats: int, left: Clock) -> list[Timed]:
    """Play all ways in turn, ``repeats`` times or until no time is left, but once; the first turn only warms up.

    A way of transformers that fails is given up, its error kept.

    Raises:
        RuntimeError: for a way that emitted another number of tokens.
    """
    timed = {name: Timed(name, batch, tokens) for name in ways}
    for repeat in range(repeats + 1):
        if repeat > 1 and left() <= 0:
            break
        rng = torch.Generator().manual_seed(1000 * batch + repeat)
        prompts: list[list[int]] = torch.randint(vocabulary, (batch, PROMPT), generator=rng).tolist()
        for name, play in ways.items():
            if timed[name].error is not None:
                continue
            torch.manual_seed(repeat)
            try:
                _turn(timed[name], play, prompts, warm_up=not repeat)
            except Exception as error:  # whatever another version of transformers brings about
                if name not in (GENERATE, ASSISTED):
                    raise
                timed[name].error = f"{type(error).__name__}: {error}"
    return list(timed.values())


def _turn(timed: Timed, play: Play, prompts: list[list[int]], warm_up: bool) -> None:
    """Play a way once; a short text and no clock where it only warms up."""
    tokens = max(2, timed.tokens // 4) if warm_up else timed.tokens
    started = time.perf_counter()
    emitted, stats = play(prompts, tokens)
    spent = time.perf_counter() - started
    if emitted != len(prompts) * tokens:
        raise RuntimeError(f"{timed.way} emitted {emitted} tokens, expected {len(prompts) * tokens}.")
    if not warm_up:
        timed.seconds.append(spent)
        timed.stats += stats


def copy_rate(device: str, megabytes: int) -> float:
    """Bytes per second that the memory reads and writes while it copies; the best of some tries."""
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(8):
        wait(device)
        started = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        wait(device)
        best = max(best, 2 * 4 * source.numel() / (time.perf_counter() - started))
    return best


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Share:
    """Of the seconds of a round, the share in which no kernel ran; None where the profiler saw no kernel."""

    way: str
    round_ms: float
    kernel_ms: float | None
    outside: float | None


def outside_kernels(way: str, decoder: Decoder, device: str, rounds: int) -> Share:
    """Play rounds at batch 1, then again under the profiler, which counts kernels (on a CPU: torch's operators).

    The profiler makes the host slower and not the kernels, so the round's seconds are those without it; on a CPU,
    where operators are the host's, those with it.
    """
    on_cuda = device.startswith("cuda")
    activity = torch.profiler.ProfilerActivity.CUDA if on_cuda else torch.profiler.ProfilerActivity.CPU
    for seed in range(2):  # the first warms up
        free = _play_rounds(decoder, device, _begun(decoder, device, seed), rounds)
    begun = _begun(decoder, device, 2)  # before the profile, which would count reading the prompt
    try:
        with torch.profiler.profile(activities=[activity]) as profile:
            profiled = _play_rounds(decoder, device, begun, rounds)
    except RuntimeError:  # counters that this machine does not let anybody read
        return Share(way, 1000 * free / rounds, None, None)
    kind = "CUDA" if on_cuda else "CPU"
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or []
        if event.device_type.name == kind and not getattr(event, "is_user_annotation", False)
    ]
    seconds = free if on_cuda else profiled
    busy = covered(spans) / 1e6 if spans else None
    outside = None if busy is None else max(0.0, 1 - busy / seconds)
    return Share(way, 1000 * seconds / rounds, None if busy is None else 1000 * busy / rounds, outside)


def _begun(decoder: Decoder, device: str, seed: int) -> Sequence:
    """A sequence behind a prompt that was read."""
    rng = torch.Generator().manual_seed(seed)
    prompt = torch.randint(decoder.target.vocab_size, (PROMPT,), generator=rng).tolist()
    decoder.prefill([prompt])
    wait(device)
    return Sequence(prompt, SamplingParams(), seed=seed)


def _play_rounds(decoder: Decoder, device: str, sequence: Sequence, rounds: int) -> float:
    """Seconds of some rounds of a sequence."""
    started = time.perf_counter()
    for _ in range(rounds):
        decoder.round(Batch([sequence], decoder.device))
    wait(device)
    return time.perf_counter() - started


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


@dataclass(frozen=True)
class Formula:
    """Theorem 3.8 beside what was measured. In plain passes, ``c`` is one of the draft and ``v`` one over the block."""

    batch: int
    gamma: int
    alpha: float
    c: float
    v: float
    paper: float
    """The gain by the paper, to which v is 1."""
    paper_v: float
    """The gain by the paper's formula with the measured v."""
    measured: float


def formula(timed: Timed, plain: Timed, gamma: int, target: PassCost, draft: PassCost) -> Formula | None:
    """The paper's gain at the measured alpha, c and v; None where nothing was judged."""
    alpha, rows = timed.alpha, timed.batch
    if alpha is None:
        return None
    c, v = draft(rows, 1) / target(rows, 1), target(rows, gamma + 1) / target(rows, 1)
    paper, paper_v = (theory.walltime_improvement(alpha, gamma, c, at) for at in (1.0, v))
    return Formula(rows, gamma, alpha, c, v, paper, paper_v, measured=timed.times(plain))


def fixed_name(gamma: int) -> str:
    """How the way with a fixed gamma is called."""
    return f"agentspec gamma {gamma}"


@dataclass(frozen=True)
class Size:
    """How much is played: at every batch, texts of ``tokens`` tokens, ``repeats`` times by every way."""

    batches: tuple[int, ...]
    gammas: tuple[int, ...]
    tokens: int
    repeats: int


def all_batches(
    target: CausalLM,
    draft: CausalLM,
    plain: tuple[PreTrainedModel, PreTrainedModel],
    costs: tuple[PassCost, PassCost],
    size: Size,
    left: Clock,
) -> Iterator[list[Timed]]:
    """The race at one batch after the other; ``plain`` are target and draft as transformers made them.

    ``costs`` are those of target and draft, for ``gamma="auto"``.
    """
    drafter = ModelDrafter(draft)
    decoders = {PLAIN: Decoder(target), **{fixed_name(g): Decoder(target, drafter, gamma=g) for g in size.gammas}}
    # Copies of the tables, for they are refined while rounds are played.
    auto = Auto(PassCost(costs[0].seconds), {drafter.name: PassCost(costs[1].seconds)})
    decoders[AUTO] = Decoder(target, drafter, gamma=auto)
    if target.captures:
        decoders[LAUNCHED] = Decoder(CausalLM(target.model, cuda_graphs=False))
    with ExitStack() as stack:
        ways = {name: engine_way(stack.enter_context(closing(LocalEngine(d)))) for name, d in decoders.items()}
        for batch in size.batches:
            here = {**ways, GENERATE: transformers_way(plain[0], None, 0)}
            if batch == 1:  # transformers assists single texts only
                here[ASSISTED] = transformers_way(*plain, 4)
            yield race(here, batch, size.tokens, target.vocab_size, size.repeats, left)
