"""What LangChain's callbacks say of calls, in the words of the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, Generation, LLMResult
from pydantic import Field, ValidationError

from agentspec.report import Step
from agentspec.report.fold import Kind


class CountedChunk(ChatGenerationChunk):
    """A chunk that says to callbacks how far its message has come; what chunks add up to does not."""

    tokens_so_far: int = Field(default=0, exclude=True)
    acceptance_rate: float | None = Field(default=None, exclude=True)


def began(kind: Kind, serialized: Mapping[str, Any] | None, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a call when it begins.

    Args:
        kind: of the call.
        serialized: what was called.
        keywords: the callback's further keywords.
    """
    metadata = keywords.get("metadata") or {}
    name = keywords.get("name") or (serialized or {}).get("name") or kind
    node = {"node": metadata.get("langgraph_node"), "task": metadata.get("langgraph_checkpoint_ns")}
    if kind == "model":
        model = metadata.get("ls_model_name") or name
        return {"name": str(model), "provider": metadata.get("ls_provider"), **node}
    return {"name": str(name), "tool_call_id": keywords.get("tool_call_id"), **node}


def answer(response: LLMResult) -> dict[str, Any]:
    """Return what is known of a model call when it is over; steps are those of models of agentspec."""
    generations = [generation for samples in response.generations for generation in samples]
    metadata = [_metadata(generation) for generation in generations]
    messages = list(_messages(generations))
    own = [each["agentspec"] for each in metadata if isinstance(each.get("agentspec"), Mapping)]
    reasons = [reason for each in metadata if isinstance(reason := each.get("finish_reason"), str)]
    asked = [call.get("id") for message in messages for call in [*message.tool_calls, *message.invalid_tool_calls]]
    return {
        "steps": [step for each in own if (step := _step(each)) is not None],
        "cached": any(each.get("cached", False) for each in own),
        "asked": frozenset(id for id in asked if id is not None),
        "finish_reason": reasons[0] if reasons else None,
        **_usage(messages, own),
    }


def _step(values: Mapping[str, Any]) -> Step | None:
    """Return a step; None for one that another version wrote otherwise."""
    try:
        return Step.model_validate(values)
    except ValidationError:
        return None


def _metadata(generation: Generation) -> Mapping[str, Any]:
    info = generation.generation_info or {}
    is_chat = isinstance(generation, ChatGeneration) and isinstance(generation.message, AIMessage)
    return {**info, **generation.message.response_metadata} if is_chat else info  # type: ignore[attr-defined]


def _messages(generations: list[Generation]) -> Iterator[AIMessage]:
    for generation in generations:
        if isinstance(generation, ChatGeneration) and isinstance(generation.message, AIMessage):
            yield generation.message


def _usage(messages: list[AIMessage], own: list[Mapping[str, Any]]) -> dict[str, int | None]:
    """Tokens read and written; the prompt of several samples is one."""
    usage = [message.usage_metadata for message in messages if message.usage_metadata]
    counted = [(counts["input_tokens"], counts["output_tokens"]) for counts in usage]
    counted = counted or [(counts["prompt_tokens"], counts["new_tokens"]) for counts in own if "new_tokens" in counts]
    return {
        "input_tokens": max((read for read, _ in counted), default=None),
        "output_tokens": sum(written for _, written in counted) if counted else None,
    }
