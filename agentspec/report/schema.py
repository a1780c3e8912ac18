"""``agentspec.run/1``: what is written of an agent run. Every view is made of this, and of nothing else.

All times are seconds. ``start_s`` counts from the start of the run (of the whole run, also inside a tool that runs an
agent of its own). A field that is not known is None, never 0. Readers ignore fields that they do not know, so that
fields may be added within a version; what changes the meaning of a field makes a new version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA: Literal["agentspec.run/1"] = "agentspec.run/1"

PassSource = Literal["measured", "engine", "extrapolated", "bound"]
"""How the seconds of a plain pass are known: from rounds of width 1 ("measured"), by the engine's table of costs, by a
line through the widths that there were, or as the cheapest pass of all, which is more than a plain one takes."""


class Record(BaseModel):
    """What all parts of a run have in common: finite numbers, unknown fields ignored, values that do not change."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, serialize_by_alias=True)


class Phases(Record):
    """Where the seconds of a model call went. They add up to the call's ``seconds``."""

    queue_s: float = Field(description="waited for a place in the engine")
    template_s: float = Field(description="messages and tools to a grammar and the ids of a prompt")
    prefill_s: float = Field(description="the target read what was new to it of the prompt")
    draft_prefill_s: float = Field(description="the drafters read what was new to them of the prompt")
    draft_s: float = Field(description="tokens were drafted, masks not counted")
    mask_s: float = Field(description="a grammar's masks of legal tokens")
    verify_s: float = Field(description="the target's passes over drafted blocks")
    sample_s: float = Field(description="distributions, acceptance and the commit of tokens")
    detokenize_s: float = Field(description="ids to text")
    other_s: float = Field(description="the rest: rounds of others, grammars compiled, threads, LangChain's own work")


class DrafterCounts(Record):
    """Tokens of one drafter; ``forced`` are those that a grammar left no choice about."""

    drafted: int = Field(description="tokens proposed")
    accepted: int = Field(description="of them, tokens that the target accepted and that were emitted")


class VerifyCost(Record):
    """Passes of the target over blocks of one width."""

    rounds: int = Field(description="passes")
    seconds: float = Field(description="of all of them together")
    least_s: float = Field(description="of the fastest of them")


class Step(Record):
    """What a model of agentspec says of one sample: counts and seconds as in ``response_metadata["agentspec"]``.

    The phases add up to ``total_s``, which is no longer than the call: what LangChain does around it is not in it.
    Rounds that were shared with other requests count in full: these are seconds waited, not seconds of the machine.
    """

    prompt_tokens: int = Field(description="tokens of the prompt")
    cached_tokens: int = Field(description="of them, tokens that the target had computed before")
    draft_cached_tokens: int | None = Field(default=None, description="the same of the draft model; None without one")
    new_tokens: int = Field(description="tokens emitted")
    rounds: int = Field(description="rounds of speculative decoding")
    target_calls: int = Field(description="passes of the target, prefill not counted")
    drafted_tokens: int = Field(description="tokens drafted where there was a choice")
    accepted_tokens: int = Field(description="of them, tokens accepted")
    rejections: int = Field(default=0, description="rounds in which the target declined a drafted token")
    forced_tokens: int = Field(description="tokens that a grammar left no choice about, drafted for free")
    constrained_tokens: int = Field(description="tokens that a grammar's mask was over")
    mean_accepted_length: float | None = Field(description="tokens emitted per round, recovered or bonus one included")
    acceptance_rate: float | None = Field(description="accepted over drafted tokens, forced ones left out")
    drafters: dict[str, DrafterCounts] = Field(description="by name of the drafter")
    accepted_lengths: dict[int, int] = Field(default_factory=dict, description="rounds by the tokens they emitted")
    verify_costs: dict[int, VerifyCost] = Field(default_factory=dict, description="by width of the block, in tokens")
    plain_pass_s: float | None = Field(
        default=None, description="target's pass over one token, by the engine's table of costs at the step's own pace"
    )
    remarks: tuple[str, ...] = Field(default=(), description="what to know of the drafts: of a model that does not pay")
    queue_s: float
    template_s: float = 0.0
    prefill_s: float
    draft_prefill_s: float = 0.0
    draft_s: float
    mask_s: float
    verify_s: float
    sample_s: float
    detokenize_s: float
    other_s: float
    ttft_s: float = Field(description="from the start of the step to the first token")
    total_s: float = Field(description="from the start of the step to its last token")
    ended_at: float = Field(description="time of day of the last token, in seconds since 1970")


class Theory(Record):
    """What the paper's formulas (arXiv 2211.17192) say for the alpha, c and gamma that were measured.

    They know neither forced tokens nor rounds without a draft, and take acceptance to be independent of position.
    """

    alpha: float = Field(
        description="share of examined drafted tokens that were accepted (tokens after a rejection were not examined)"
    )
    gamma: float = Field(description="mean drafted tokens per round, forced ones left out")
    c: float = Field(description="seconds of a drafted token over seconds of a plain pass of the target")
    v: float = Field(description="seconds of a verifying pass over seconds of a plain one; the paper takes it to be 1")
    tokens_per_round: float = Field(description="equation 1: (1 - alpha^(gamma+1)) / (1 - alpha)")
    improvement: float = Field(description="theorem 3.8: equation 1 over (gamma c + 1)")
    improvement_at_v: float = Field(description="the same over (gamma c + v)")


class Gain(Record):
    """Whether speculation was worth it, for one call or for all calls of a run whose model says so.

    ``decode_s`` are the seconds of the rounds (draft, mask, verify, sample, detokenise); prompts are left out, for
    they cost the same without speculation.
    """

    estimated: bool = Field(
        description="False where a plain run was measured; True where ``plain_decode_s`` is what "
        "the tokens would have taken at the cost of a plain round of this run"
    )
    tokens: int = Field(description="emitted by the rounds, those that a stop string took off again included")
    remarks: tuple[str, ...] = Field(default=(), description="what to know of the drafts: of a model that does not pay")
    target_calls: int
    target_calls_saved: int = Field(description="tokens - target calls: one of each without speculation")
    drafters: dict[str, DrafterCounts]
    acceptance_rate: float | None
    mean_accepted_length: float | None = Field(description="tokens emitted per target call")
    accepted_lengths: dict[int, int] = Field(description="rounds by the tokens they emitted")
    draft_s: float = Field(description="seconds of drafting")
    wasted_draft_s: float = Field(description="draft seconds x share of drafted tokens that were not accepted")
    c: float | None = Field(description="seconds of a drafted token over those of a plain pass of the target")
    plain_pass_s: float | None = Field(description="seconds of a pass of the target over one token")
    plain_pass_from: PassSource | None = Field(description="how ``plain_pass_s`` is known")
    decode_s: float = Field(description="seconds of all rounds")
    plain_decode_s: float | None = Field(description="seconds for the same tokens without speculation")
    ratio: float | None = Field(description="plain_decode_s / decode_s: above 1 speculation was worth it")
    saved_s: float | None = Field(description="plain_decode_s - decode_s - seconds in which the draft read prompts")
    baseline: str | None = Field(default=None, description="name of the plain run, where one was measured")
    same_tokens: bool | None = Field(
        default=None,
        description="whether the plain run emitted as many tokens; where it did not, seconds per token are compared",
    )
    theory: Theory | None = Field(default=None, description="what the paper expects")


class ModelCall(Record):
    """One call of a chat model or LLM, from the callback that begins it to the one that ends it."""

    name: str = Field(description="of the model")
    provider: str | None = Field(default=None, description="as LangChain names it (agentspec, openai, ...)")
    id: str | None = Field(default=None, description="run id of LangChain's callbacks")
    node: str | None = Field(default=None, description="name of the graph's node that made the call")
    start_s: float = Field(description="from the start of the run")
    seconds: float = Field(description="how long it took")
    ttft_s: float | None = Field(default=None, description="from the start of the call to its first token")
    streamed: bool = Field(default=False, description="whether tokens were sent as they came")
    cached: bool = Field(
        default=False,
        description="a cache gave the answer: seconds are those of finding it, no step counts",
    )
    error: str | None = Field(default=None, description="repr of the exception")
    input_tokens: int | None = Field(default=None, description="of the prompt, where the model says so")
    output_tokens: int | None = Field(default=None, description="of the answer, where the model says so")
    finish_reason: str | None = None
    phases: Phases | None = Field(default=None, description="None for models that do not say")
    step: Step | None = Field(default=None, description="of the sample that took longest; None where not reported")
    other_samples: list[Step] = Field(default_factory=list, description="of the other samples (n > 1)")
    gain: Gain | None = Field(default=None, description="None where no step is known")

    @property
    def end_s(self) -> float:
        """When it was over, from the start of the run."""
        return self.start_s + self.seconds

    @property
    def steps(self) -> list[Step]:
        """The steps of all samples; empty where none is known."""
        return [] if self.step is None else [self.step, *self.other_samples]


class ToolCall(Record):
    """One call of a tool. Parallel ones overlap."""

    name: str
    id: str | None = Field(default=None, description="run id of LangChain's callbacks")
    tool_call_id: str | None = Field(default=None, description="of the model's call that asked for it")
    start_s: float = Field(description="from the start of the run")
    seconds: float
    error: str | None = Field(default=None, description="repr of the exception")
    model_s: float = Field(default=0.0, description="of them, those in which a model within the tool was at work")
    iterations: list[Iteration] = Field(
        default_factory=list,
        description="of an agent that the tool runs; their seconds are part of the tool's and are counted nowhere else",
    )
    tools: list[ToolCall] = Field(default_factory=list, description="tools called within the tool before any model")

    @property
    def end_s(self) -> float:
        """When it was over, from the start of the run."""
        return self.start_s + self.seconds


class Iteration(Record):
    """One turn of a tool loop: a model node and the tools it asked for. ``seconds = model_s + tool_s + framework_s``.

    It lasts until the next iteration begins; the first one begins with the run (or the tool) that it is part of, and
    the last one ends with it, so that iterations add up to it. Where several agents run at once, their iterations take
    turns: the seconds of each are those of the slice between two beginnings, and its calls may go on after it.
    """

    start_s: float = Field(description="from the start of the run")
    seconds: float
    model_s: float = Field(description="a model was at work")
    tool_s: float = Field(description="a tool, but no model, was at work: parallel tools are a union, not a sum")
    framework_s: float = Field(description="neither: graph, messages, callbacks, the program itself")
    idle_s: float = Field(description="of framework_s, the seconds outside of every chain, model and tool")
    models: list[ModelCall] = Field(
        description="usually one; retries, and calls of one node or made at once, are several"
    )
    tools: list[ToolCall] = Field(default_factory=list)


class RunRecord(Record):
    """An agent run. ``total_s = model_s + tool_s + framework_s``, and so do the iterations, where there are any."""

    schema_version: Literal["agentspec.run/1"] = Field(default=SCHEMA, alias="schema")
    name: str | None = None
    began_at: float = Field(description="time of day, in seconds since 1970")
    total_s: float = Field(description="wall time")
    model_s: float = Field(description="a model of the agent itself was at work; models within tools are tool time")
    tool_s: float = Field(description="a tool, but no model of the agent itself, was at work")
    framework_s: float = Field(description="neither: graph, messages, callbacks, and ``idle_s``")
    idle_s: float = Field(
        description="of framework_s, the seconds outside of every chain, model and tool: the "
        "program's own, before, between and after what it ran"
    )
    budget_s: float | None = Field(default=None, description="seconds that the run was to take at most")
    error: str | None = Field(default=None, description="repr of the exception that ended the run")
    iterations: list[Iteration] = Field(default_factory=list)
    tools: list[ToolCall] = Field(default_factory=list, description="called before any model")
    gain: Gain | None = Field(default=None, description="of all calls whose steps are known; None without any")

    @property
    def over_budget_s(self) -> float:
        """Seconds over the budget; 0 within it, or without one."""
        return 0.0 if self.budget_s is None else max(0.0, self.total_s - self.budget_s)

    @property
    def model_calls(self) -> list[ModelCall]:
        """All model calls, those within tools too, by their beginning."""
        found = [call for part in _parts(self) for iteration in part.iterations for call in iteration.models]
        return sorted(found, key=lambda call: call.start_s)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """All tool calls, those within tools too, by their beginning."""
        return sorted((tool for part in _parts(self) for tool in _own_tools(part)), key=lambda tool: tool.start_s)


def _own_tools(part: RunRecord | ToolCall) -> list[ToolCall]:
    return [*part.tools, *(tool for iteration in part.iterations for tool in iteration.tools)]


def _parts(part: RunRecord | ToolCall) -> Iterator[RunRecord | ToolCall]:
    """Yield a run or tool, and all tools within it."""
    yield part
    for tool in _own_tools(part):
        yield from _parts(tool)
