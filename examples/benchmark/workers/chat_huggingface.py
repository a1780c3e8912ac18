"""LangChain's ``ChatHuggingFace`` for ``peers.py``: ``chat_huggingface.py MODEL``, run by a python that has it.

It takes messages, and gives text: its ids are those of the text, without the end token.
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from typing import Any

import torch
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
from protocol import Peer, serve


class Chat:
    """A chat model on a local pipeline."""

    def __init__(self, model: str) -> None:
        self.about = f"langchain-huggingface {version('langchain-huggingface')}, transformers {version('transformers')}"
        self._pipeline = HuggingFacePipeline.from_model_id(
            model_id=model, task="text-generation", model_kwargs={"dtype": torch.float32}
        )
        self._tokenizer = self._pipeline.pipeline.tokenizer

    def forget(self) -> None:
        """It remembers nothing."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One sample after the other."""
        settings: dict[str, Any] = {"max_new_tokens": request["max_tokens"], "return_full_text": False}
        settings["do_sample"] = request["temperature"] > 0
        if settings["do_sample"]:
            settings |= {"temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
        torch.manual_seed(request["seed"])
        chat = ChatHuggingFace(llm=self._pipeline, tokenizer=self._tokenizer)
        messages = [(message["role"], message["content"]) for message in request["messages"]]
        started = time.perf_counter()
        texts = [chat.invoke(messages, pipeline_kwargs=settings).content for _ in range(request["n"])]
        seconds = time.perf_counter() - started
        samples = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return {"samples": samples, "seconds": seconds, "prompt_s": None}


def load() -> Peer:
    """The model of the command line."""
    return Chat(sys.argv[1])


if __name__ == "__main__":
    serve(load)
