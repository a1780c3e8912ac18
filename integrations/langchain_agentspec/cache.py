"""``AgentSpecCache``: answers kept on disk between processes, read back without executing anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from langchain_core.caches import RETURN_VAL_TYPE, BaseCache
from langchain_core.messages import AIMessage, message_to_dict, messages_from_dict
from langchain_core.outputs import ChatGeneration, Generation

from agentspec.runtime.cache import DiskCache
from agentspec.runtime.paths import root


class AgentSpecCache(BaseCache):
    """A cache of LangChain's for any model, over the hardened disk cache.

    Args:
        folder: belongs to the user alone (mode 0700), and is made where it is missing; None for ``answers`` in the
            folder of everything that agentspec keeps.
        size_limit: bytes to keep, about.

    Raises:
        CacheError: for a folder that others could have written to.

    Example:
        langchain_core.globals.set_llm_cache(AgentSpecCache())
    """

    def __init__(self, folder: Path | str | None = None, size_limit: int = 2**30) -> None:
        self._disk = DiskCache(root() / "answers" if folder is None else Path(folder), size_limit)

    def lookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        """Return the answers to a prompt, marked as cached; None where there are none."""
        kept = self._disk.get(_key(prompt, llm_string))
        try:
            return None if kept is None else [_read(value) for value in json.loads(kept)]
        except (ValueError, KeyError, TypeError):  # what another version wrote
            return None

    def update(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        """Keep the answers to a prompt, if they are JSON."""
        try:
            value = json.dumps([_written(generation) for generation in return_val])
        except (TypeError, ValueError):
            return
        self._disk.set(_key(prompt, llm_string), value.encode())

    def clear(self, **kwargs: Any) -> None:
        """Forget all answers."""
        self._disk.clear()


def _key(prompt: str, llm_string: str) -> str:
    return json.dumps([prompt, llm_string])


def _written(generation: Generation) -> dict[str, Any]:
    message = message_to_dict(generation.message) if isinstance(generation, ChatGeneration) else None
    return {"text": generation.text, "message": message, "generation_info": generation.generation_info}


def _read(value: dict[str, Any]) -> Generation:
    if value["message"] is None:
        return Generation(text=value["text"], generation_info=_marked(value["generation_info"]))
    [message] = messages_from_dict([value["message"]])
    if isinstance(message, AIMessage):
        message.response_metadata = _marked(message.response_metadata) or {}
    return ChatGeneration(message=message, generation_info=value["generation_info"])


def _marked(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a step's metadata without counts and seconds, which are those of an earlier call."""
    return {**metadata, "agentspec": {"cached": True}} if metadata and "agentspec" in metadata else metadata
