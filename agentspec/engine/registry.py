"""Target/draft pairs: loading them, mapping tokens where vocabularies differ, and sharing them in the process."""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from dataclasses import InitVar, dataclass
from typing import Any

from transformers import AutoTokenizer

from agentspec.drafters import Drafter
from agentspec.drafters.cascade import Cascade
from agentspec.drafters.model import ModelDrafter
from agentspec.drafters.suffix import SuffixDrafter
from agentspec.engine.local import LocalEngine
from agentspec.errors import IncompatiblePairError, ModelLoadError, TokenizerError
from agentspec.models.causal_lm import CausalLM
from agentspec.models.cross_vocab.mapping import VocabMapping
from agentspec.models.cross_vocab.model import CrossVocabModel
from agentspec.models.embedded import path as embedded_path
from agentspec.models.switches import Switch, replace_compile
from agentspec.runtime.threads import in_forked_child
from agentspec.speculative import SpeculativeDecoder

EMBEDDED = "embedded"

LEAST_SHARED = 0.25
"""Share of the smaller vocabulary that a draft of another tokenizer must have in common with its target."""


@dataclass(frozen=True)
class PairSpec:
    """What makes two chat models share one engine.

    Args:
        model: target: ``"embedded"``, a directory, or a hub name.
        draft: draft model, named likewise, best of the same family: one of another tokenizer drafts the tokens that
            both have. None drafts by look-up alone.
        device: None for CUDA where there is one.
        dtype: None for float32 on CPU and bfloat16 elsewhere.
        revision: of the target on the hub.
        cuda_graphs: whether passes are captured as CUDA graphs; "auto" where there is CUDA.
        native_kernels: whether kernels are compiled on a CPU; "auto" where that can be done.
        compile: old name of both, for one release.

    Raises:
        ModelLoadError: for ``compile`` beside one of the two, or a value that is no switch.
    """

    model: str = EMBEDDED
    draft: str | None = None
    device: str | None = None
    dtype: str | None = None
    revision: str | None = None
    cuda_graphs: Switch = "auto"
    native_kernels: Switch = "auto"
    compile: InitVar[Switch | None] = None

    def __post_init__(self, compile: Switch | None) -> None:
        found = replace_compile(compile, self.cuda_graphs, self.native_kernels, stacklevel=4)
        for name, value in zip(("cuda_graphs", "native_kernels"), found, strict=True):
            object.__setattr__(self, name, value)


_log = logging.getLogger("agentspec")
_engines: dict[PairSpec, LocalEngine] = {}
_locks: defaultdict[PairSpec, threading.Lock] = defaultdict(threading.Lock)  # one's loading delays no other


def shared_engine(spec: PairSpec) -> LocalEngine:
    """Return the process's one engine for a pair, loaded at the first call.

    Raises:
        ModelLoadError: for a model that cannot be loaded.
        IncompatiblePairError: for a draft that has too few tokens in common with the target.
    """
    with _locks[spec]:
        engine = _engines.get(spec)
        if engine is None or engine.is_closed:
            engine = _engines[spec] = load_engine(spec)
        return engine


def _forget_loading() -> None:
    """In a forked child: another thread of the parent may have been loading; idle engines stay usable."""
    _locks.clear()


in_forked_child(_forget_loading)


def load_engine(spec: PairSpec) -> LocalEngine:
    """Load a new engine for a pair: forced tokens and copied spans are drafted for free, the rest by the draft.

    Raises:
        ModelLoadError: for a model that cannot be loaded.
        IncompatiblePairError: for a draft that has too few tokens in common with the target.
    """
    tokenizer = load_tokenizer(spec.model, spec.revision)
    drafters: list[Drafter] = [SuffixDrafter()]
    if spec.draft is not None:
        draft_tokenizer = load_tokenizer(spec.draft)
        mapping = map_vocabulary(spec.model, tokenizer, spec.draft, draft_tokenizer)
        draft = _load_model(spec.draft, None, spec)
        _check_logits(spec.draft, draft_tokenizer, draft)
        drafters.append(ModelDrafter(draft if mapping is None else CrossVocabModel(draft, mapping)))
    target = _load_model(spec.model, spec.revision, spec)
    target.limit_vocab(_check_logits(spec.model, tokenizer, target))
    _log.info("%s: KV cache of %s", spec.model, target.kv.memory)
    return LocalEngine(SpeculativeDecoder(target, Cascade(drafters), "auto"), tokenizer)


def _check_logits(name: str, tokenizer: Any, model: CausalLM) -> int:
    """Return how many ids a tokenizer has; raise where its model has no logits for one of them."""
    ids: int = max(tokenizer.get_vocab().values()) + 1
    if ids > model.vocab_size:
        raise ModelLoadError(
            f"{name}: the tokenizer has {ids} ids and the model scores {model.vocab_size}; expected a tokenizer of "
            "this model, with no more ids than it scores."
        )
    return ids


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """Load the tokenizer of a model.

    Raises:
        ModelLoadError: where there is none.
    """
    path = embedded_path() if name == EMBEDDED else name
    try:
        return AutoTokenizer.from_pretrained(path, **({} if revision is None else {"revision": revision}))
    except Exception as error:  # transformers and the hub raise nearly every type here
        raise ModelLoadError(
            f"{name}: expected 'embedded', a directory with a tokenizer, or a hub name; no tokenizer could be loaded: "
            f"{error}"
        ) from error


def map_vocabulary(target: str, target_tokenizer: Any, draft: str, draft_tokenizer: Any) -> VocabMapping | None:
    """From the target's tokens to the draft's; None where every id means the same to both.

    Raises:
        IncompatiblePairError: where they have too few tokens in common, or none that can be compared; names both.
    """
    if target_tokenizer.get_vocab() == draft_tokenizer.get_vocab():
        return None
    pair = f"Target {target!r} and draft {draft!r} have different tokenizers"
    advice = "Choose a draft of the target's own family, or one whose tokenizer is closer to the target's."
    try:
        mapping = VocabMapping(target_tokenizer, draft_tokenizer)
    except TokenizerError as error:
        raise IncompatiblePairError(f"{pair}, and their tokens cannot be compared. {error} {advice}") from error
    found, ours, theirs = len(mapping.shared), mapping.target_tokens, mapping.draft_tokens
    expected = math.ceil(LEAST_SHARED * min(ours, theirs))
    shares = f"{found:,} of {ours:,} (target) and {theirs:,} (draft) tokens are in both vocabularies"
    if found < expected:
        raise IncompatiblePairError(
            f"{pair}: {shares}, expected at least {expected:,}, which is {LEAST_SHARED:.0%} of the smaller one. "
            f"Nothing else could be drafted, so that hardly any draft would be accepted. {advice}"
        )
    _log.info("%s drafts for %s in a vocabulary of its own: %s, and only those are drafted", draft, target, shares)
    return mapping


def _load_model(name: str, revision: str | None, spec: PairSpec) -> CausalLM:
    return CausalLM.from_pretrained(
        embedded_path() if name == EMBEDDED else name,
        device=spec.device,
        dtype=spec.dtype,
        revision=revision,
        cuda_graphs=spec.cuda_graphs,
        native_kernels=spec.native_kernels,
    )
