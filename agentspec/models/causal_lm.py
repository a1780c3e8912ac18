"""A transformers causal language model behind the ``LanguageModel`` seam: whole contexts in, only the news computed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from agentspec.errors import ContextOverflowError, InvalidRequestError, ModelLoadError, check_option
from agentspec.models import LanguageModel
from agentspec.models.backends.native import kernels
from agentspec.models.backends.native.sampling import NativeSampling
from agentspec.models.backends.sampling import TORCH, SamplingKernels
from agentspec.models.config_fields import end_token_ids as config_end_token_ids
from agentspec.models.config_fields import log_unscored_ends, longest_context
from agentspec.models.feed import Feed
from agentspec.models.forward import SHORT_FEED, Forward
from agentspec.models.fusion import fused_modules
from agentspec.models.graphs import recorder_for
from agentspec.models.kv_cache import RaggedKV
from agentspec.models.kv_memory import default_budget
from agentspec.models.loading import forward_keywords, load_module, parse_dtype, usable_device
from agentspec.models.logits import Logits, RowLogits, stack
from agentspec.models.packing import compiled_by, layouts
from agentspec.models.probe import Probe
from agentspec.models.switches import Switch, replace_compile
from agentspec.models.tuning import tune
from agentspec.runtime.threads import apart, exclusive

_alone = exclusive("model")  # whatever objects are made around it


class CausalLM(LanguageModel):
    """A decoder-only transformers model as a ``LanguageModel``.

    ``cuda_graphs`` captures passes as CUDA graphs (``"auto"``: where there is CUDA); one that cannot be captured is
    launched kernel by kernel, with one warning and the same results. ``compile`` is its old name, for one release.

    ``rows`` contexts are kept cached, within ``memory_budget_bytes`` of K and V (default: 4 GiB on CPU, half of the
    free memory on CUDA); long contexts are read ``prefill_chunk`` tokens at a time. The module is put into evaluation
    mode, its parameters stop requiring gradients, and its attention implementation may be switched. Threads and
    engines may share a model: it computes for one at a time.

    Raises ``ModelLoadError`` for a model whose state cannot be addressed by position, whose config names a length, a
    window or an end token that is none, or whose cached logits differ from its uncached ones.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int = 8,
        memory_budget_bytes: int | None = None,
        prefill_chunk: int = 512,
        cuda_graphs: Switch = "auto",
        compile: Switch | None = None,
    ) -> None:
        cuda_graphs, _ = replace_compile(compile, cuda_graphs, "auto")
        if rows < 1 or prefill_chunk < 1:
            raise ValueError(f"rows and prefill_chunk must be at least 1, got {rows} and {prefill_chunk}")
        keywords = forward_keywords(model)
        self._max_context = longest_context(model)
        embeddings: Any = model.get_input_embeddings()
        self._vocab_size: int = embeddings.weight.shape[0]
        log_unscored_ends(model, self._vocab_size)
        self.model = model.eval().requires_grad_(False)
        self._device = model.device
        self.kv = RaggedKV(rows=2, max_slots=self._max_context + SHORT_FEED)
        self._forward = Forward(self.model, self.kv, keywords, self._vocab_size)
        self.prefill_chunk = prefill_chunk
        self.computed_tokens = 0
        """Tokens fed to the model so far, padding not counted."""
        self._probe()
        budget = default_budget(self.device) if memory_budget_bytes is None else memory_budget_bytes
        self.kv.resize(rows=rows, budget_bytes=budget)
        self._forward.capture_with(recorder_for(cuda_graphs, self.device))

    @classmethod
    @apart
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        gguf_file: str | None = None,
        allow_pickle: bool = False,
        rows: int = 8,
        memory_budget_bytes: int | None = None,
        prefill_chunk: int = 512,
        fuse: bool = True,
        pack: bool | None = None,
        cuda_graphs: Switch = "auto",
        native_kernels: Switch = "auto",
        compile: Switch | None = None,
    ) -> CausalLM:
        """Load a model from a directory or the hub: safetensors, or ``gguf_file`` within it.

        ``device`` defaults to CUDA where there is one; ``dtype`` to float32 on CPU and bfloat16 elsewhere. Pickled
        checkpoints and remote code are read only when asked for by ``allow_pickle`` and ``trust_remote_code``.
        ``fuse`` computes the model in fewer operators (see ``models/fusion.py``), ``pack`` lays the weights out for
        their products (see ``models/packing.py``); None does so where it can be done: float32 on a CPU. There
        ``native_kernels`` compiles these products, with a C++ compiler; without one they are oneDNN's. All three round
        otherwise than transformers' own layers. ``compile`` is the old name of ``cuda_graphs`` and ``native_kernels``,
        for one release.

        Raises ``ModelLoadError`` when there is no such model or device, weights are missing, cut off, pickled, or
        left over, config.json holds a value that is none, an option has another value, or the model is refused.
        """
        check_option("fuse", fuse, (True, False))
        check_option("pack", pack, (None, True, False))
        cuda_graphs, native_kernels = replace_compile(compile, cuda_graphs, native_kernels, stacklevel=4)
        target = usable_device(device)
        model = load_module(
            os.fspath(name_or_path),
            dtype=parse_dtype(dtype, target),
            revision=revision,
            trust_remote_code=trust_remote_code,
            gguf_file=gguf_file,
            allow_pickle=allow_pickle,
        )
        torch.nn.Module.to(model, target)
        forward_keywords(model)  # refuses what cannot be served, before anything is made of it
        tune(model, fuse=fuse, pack=pack, native_kernels=native_kernels)
        return cls(
            model,
            rows=rows,
            memory_budget_bytes=memory_budget_bytes,
            prefill_chunk=prefill_chunk,
            cuda_graphs=cuda_graphs,
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids V that a row of logits covers."""
        return self._vocab_size

    @property
    def max_context(self) -> int:
        """Longest context, in tokens, over which the model's positions mean the same at every length."""
        return self._max_context

    @property
    def device(self) -> torch.device:
        """Where the model computes, and where logits are returned."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights and of K and V."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def max_running(self) -> int:
        """Contexts that are kept cached at most: more at once would push each other out."""
        return self.kv.max_rows

    @property
    def is_cached(self) -> bool:
        """Yes."""
        return True

    @property
    def sampling_kernels(self) -> SamplingKernels:
        """The native ones where the model computes with them, or torch's."""
        return TORCH if compiled_by(self.model) is None else NativeSampling(kernels())

    @property
    def captures(self) -> bool:
        """Whether short passes are captured as graphs."""
        return self._forward.graphs.is_on

    @property
    def replayed_passes(self) -> int:
        """Passes so far that were the replay of a graph."""
        return self._forward.graphs.replays

    @property
    def fits_any_threads(self) -> bool:
        """Whether logits are the same on any number of threads: of our own kernels, and where a device computes."""
        return self._forward.is_compiled or self.device.type != "cpu"

    @property
    def fingerprint(self) -> str:
        """Tells models of other sizes or types apart, as far as that matters for what a pass costs."""
        layers = f"{fused_modules(self.model)} fused {sorted(layouts(self.model).items())} {compiled_by(self.model)}"
        captured = "captured" if self.captures else "launched"
        return f"{type(self.model).__name__} {self.dtype} {layers} {captured} {self.model.config.to_json_string()}"

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Ids that the checkpoint names as ends: many chat models have several."""
        return frozenset(i for i in config_end_token_ids(self.model) if 0 <= i < self.vocab_size)

    @_alone
    def limit_vocab(self, vocab_size: int) -> None:
        """Leave out the logits of ids from ``vocab_size`` on: padding of the head that no token stands for.

        Raises ``ModelLoadError`` for more ids than the model scores.
        """
        if not 0 < vocab_size <= self._vocab_size:
            raise ModelLoadError(
                f"The tokenizer has {vocab_size} ids and the model scores {self._vocab_size}; expected a tokenizer of "
                "this model, with no more ids than it scores"
            )
        self._vocab_size = self._forward.vocab_size = vocab_size

    @_alone
    def cached_tokens(self, context: list[int]) -> int:
        """Length of the longest prefix of ``context`` that some KV row holds."""
        return self.kv.longest_prefix(context)[1]

    @_alone
    def next_logits(self, contexts: Sequence[list[int]], last: Sequence[int]) -> Logits:
        """Return the logits ``[B, max(last), V]`` after each of the final ``last[b]`` tokens of ``contexts[b]``.

        Row b's first ``last[b]`` entries are meant, the rest is zero. Equal contexts are computed once, and contexts
        beyond the number of KV rows are served in turns.

        Raises, before anything is computed, ``ContextOverflowError`` for a context beyond ``max_context`` and
        ``InvalidRequestError`` for empty contexts, unknown ids, a ``last`` outside ``0 .. len(context)``, or a context
        whose K and V exceed the memory budget.
        """
        known = list(map(self.cached_tokens, contexts))
        self._validate(contexts, last, known)
        if not contexts:
            return Logits(torch.empty(0, 0, self.vocab_size, device=self.device))
        first_seen: dict[tuple[int, ...], int] = {}
        twins = [first_seen.setdefault(tuple(context), index) for index, context in enumerate(contexts)]
        asked = dict.fromkeys(first_seen.values(), 0)
        for twin, count in zip(twins, last, strict=True):
            asked[twin] = max(asked[twin], count)

        self.kv.release()  # a process that was forked in the middle of a pass finds rows taken
        rows = self.kv.reserve(len(asked), max(map(len, contexts)) + SHORT_FEED)
        # The longest match goes first, so that a context keeps its own row and newcomers fork from it.
        order = sorted(asked, key=lambda index: -known[index])
        tails: dict[int, RowLogits] = {}  # context -> [asked, V]
        for begin in range(0, len(order), rows):
            tails |= self._serve({index: contexts[index] for index in order[begin : begin + rows]}, asked)
        # Outside inference mode, so that callers get ordinary tensors.
        return stack([tails[twin].last(count) for twin, count in zip(twins, last, strict=True)])

    def _validate(self, contexts: Sequence[list[int]], last: Sequence[int], known: Sequence[int]) -> None:
        """``known`` are lengths of prefixes that were validated before."""
        if len(contexts) != len(last):
            raise InvalidRequestError(f"expected one `last` per context, got {len(last)} for {len(contexts)} contexts")
        for index, (context, count) in enumerate(zip(contexts, last, strict=True)):
            if not context:
                raise InvalidRequestError(f"context {index} is empty; expected at least one token to continue from")
            if len(context) > self.max_context:
                raise ContextOverflowError(
                    f"context {index} has {len(context)} tokens, the model's positions reach {self.max_context}; "
                    "shorten the prompt or ask for fewer new tokens"
                )
            news = context[known[index] :]
            if news and (min(news) < 0 or max(news) >= self.vocab_size):
                stray = next(token for token in news if not 0 <= token < self.vocab_size)
                raise InvalidRequestError(
                    f"context {index} holds the id {stray}, expected 0 to {self.vocab_size - 1}; "
                    "was it encoded with this model's tokenizer?"
                )
            if not 0 <= count <= len(context):
                raise InvalidRequestError(
                    f"last[{index}] is {count}, expected 0 to {len(context)}, the length of its context"
                )

    @torch.inference_mode()
    def _serve(self, contexts: dict[int, list[int]], asked: dict[int, int]) -> dict[int, RowLogits]:
        """Compute the ``asked`` tails of no more ``contexts`` than there are KV rows: ``{index: [asked, V]}``."""
        tails: dict[int, RowLogits] = {}
        short: list[Feed] = []
        try:
            for index, context in contexts.items():
                row, start = self.kv.claim(context, limit=len(context) - asked[index])
                feed = Feed(index, row, start, context[start:], asked[index])
                if len(feed.tokens) > SHORT_FEED:
                    tails[index] = self._read_long(feed)
                else:
                    short.append(feed)
            tails |= self._read_short(sorted(short, key=lambda feed: feed.row))
        finally:
            self.kv.release()
        return tails

    def _read_long(self, feed: Feed) -> RowLogits:
        """Read one long feed in chunks; returns what was asked ``[last, V]``."""
        kept: list[RowLogits] = []
        for offset in range(0, len(feed.tokens), self.prefill_chunk):
            tokens = feed.tokens[offset : offset + self.prefill_chunk]
            wanted = min(len(tokens), max(0, offset + len(tokens) - feed.unasked))
            kept += self._pass([Feed(feed.context, feed.row, feed.start + offset, tokens, wanted)])
        known = [token for part in kept for token in part.argmax or []]
        values = torch.cat([part.values for part in kept])
        return RowLogits(values, known if len(known) == len(values) else None)

    def _read_short(self, feeds: list[Feed]) -> dict[int, RowLogits]:
        """Read short feeds of ascending rows in one forward: ``{context: [last, V]}``."""
        nothing = RowLogits(torch.empty(0, self.vocab_size, device=self.device), [])
        tails = {feed.context: nothing for feed in feeds if not feed.tokens}
        feeds = [feed for feed in feeds if feed.tokens]
        if feeds:
            tails |= zip((feed.context for feed in feeds), self._pass(feeds), strict=True)
        return tails

    def _pass(self, feeds: list[Feed]) -> list[RowLogits]:
        """One pass over feeds of ascending rows: what was asked of each ``[last, V]``."""
        found = self._forward(feeds)
        self.computed_tokens += sum(len(feed.tokens) for feed in feeds)
        return found

    @_alone
    def _probe(self) -> None:
        """Refuse a model whose logits from ragged cached blocks differ from those of plain uncached forwards."""
        Probe(self.model, self._forward, self.kv, self.next_logits).run(self.max_context)
        self.computed_tokens = 0
