"""llama.cpp for ``peers.py``: ``llama.py GGUF TOKENIZER.json THREADS``, run by a python that has llama-cpp-python.

Greedy decoding keeps to grammars where llguidance is installed beside it. It reuses the part of a prompt that is the
same as in the call before, as llama-cpp-python does by itself.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import llama_cpp
import numpy as np
from protocol import Peer, serve

CONTEXT = 8192


class Llama:
    """One model, one sequence at a time."""

    def __init__(self, gguf: str, tokenizer: str, threads: int) -> None:
        self.about = f"llama-cpp-python {llama_cpp.__version__}"
        self._model = llama_cpp.Llama(
            gguf, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False, logits_all=False
        )
        self._tokenizer_file = tokenizer
        self._end = self._model.token_eos()

    def forget(self) -> None:
        """Forget the last prompt."""
        self._model.reset()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One sample after the other."""
        started = time.perf_counter()
        samples, prompt_s = [], None
        for index in range(request["n"]):
            self._model.set_seed(request["seed"] + index)
            ids: list[int] = []
            for token in self._tokens(request):
                if prompt_s is None:
                    prompt_s = time.perf_counter() - started
                if token == self._end:
                    break
                ids.append(int(token))
                if len(ids) == request["max_tokens"]:
                    break
            samples.append(ids)
        return {"samples": samples, "seconds": time.perf_counter() - started, "prompt_s": prompt_s}

    def _tokens(self, request: dict[str, Any]) -> Any:
        settings = {"temp": request["temperature"], "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        if request["lark"] is None:
            return self._model.generate(request["prompt"], **settings)
        masks = Masks(self._tokenizer_file, self._model.n_vocab(), self._end, request["lark"], len(request["prompt"]))
        processors = llama_cpp.LogitsProcessorList([masks])
        return self._model.generate(request["prompt"], logits_processor=processors, **settings)


class Masks:
    """A grammar as a logits processor; where nothing may follow, the end token does."""

    def __init__(self, tokenizer: str, vocab_size: int, end: int, lark: str, prompt_length: int) -> None:
        import llguidance
        import llguidance.numpy

        with open(tokenizer) as file:
            known = llguidance.LLTokenizer(file.read(), n_vocab=vocab_size, eos_token=end)
        self._fill = llguidance.numpy.fill_next_token_bitmask
        self._mask = llguidance.numpy.allocate_token_bitmask(1, known.vocab_size)
        self._matcher = llguidance.LLMatcher(known, llguidance.LLMatcher.grammar_from_lark(lark))
        self._end, self._seen = end, prompt_length

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """The scores with everything illegal at minus infinity."""
        self._matcher.consume_tokens([int(token) for token in input_ids[self._seen :]])
        self._seen = len(input_ids)
        legal = np.zeros(len(scores), dtype=bool)
        if self._matcher.is_stopped():
            legal[self._end] = True
        else:
            self._fill(self._matcher, self._mask)
            legal[:] = np.unpackbits(self._mask[0].view(np.uint8), count=len(scores), bitorder="little")
        return np.where(legal, scores, -np.inf).astype(scores.dtype)


def load() -> Peer:
    """The model of the command line."""
    gguf, tokenizer, threads = sys.argv[1:]
    return Llama(gguf, tokenizer, int(threads))


if __name__ == "__main__":
    serve(load)
