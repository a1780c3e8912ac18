"""Target/draft pairs: loading them, checking that they speak the same tokens, and sharing them in the process."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from agentspec.drafters import Drafter
from agentspec.drafters.cascade import Cascade
from agentspec.drafters.model import ModelDrafter
from agentspec.drafters.suffix import SuffixDrafter
from agentspec.embedded import path as embedded_path
from agentspec.engine import LocalEngine
from agentspec.errors import IncompatiblePairError, ModelLoadError
from agentspec.models.causal_lm import CausalLM
from agentspec.speculative import SpeculativeDecoder

EMBEDDED = "embedded"


@dataclass(frozen=True)
class PairSpec:
    """What makes two chat models share one engine.

    Args:
        model: target: ``"embedded"``, a directory, or a hub name.
        draft: draft model, named likewise; None drafts by look-up alone.
        device: None for CUDA where there is one.
        dtype: None for float32 on CPU and bfloat16 elsewhere.
        revision: of the target on the hub.
    """

    model: str = EMBEDDED
    draft: str | None = None
    device: str | None = None
    dtype: str | None = None
    revision: str | None = None


_log = logging.getLogger("agentspec")
_engines: dict[PairSpec, LocalEngine] = {}
_locks: defaultdict[PairSpec, threading.Lock] = defaultdict(threading.Lock)  # one's loading delays no other


def shared_engine(spec: PairSpec) -> LocalEngine:
    """The process's one engine for a pair, loaded at the first call.

    Raises:
        ModelLoadError: for a model that cannot be loaded.
        IncompatiblePairError: for a draft that does not speak the target's tokens.
    """
    with _locks[spec]:
        engine = _engines.get(spec)
        if engine is None or engine.is_closed:
            engine = _engines[spec] = load_engine(spec)
        return engine


def load_engine(spec: PairSpec) -> LocalEngine:
    """A new engine for a pair: forced tokens and copied spans are drafted for free, the rest by the draft, if any.

    Raises:
        ModelLoadError: for a model that cannot be loaded.
        IncompatiblePairError: for a draft that does not speak the target's tokens.
    """
    tokenizer = load_tokenizer(spec.model, spec.revision)
    drafters: list[Drafter] = [SuffixDrafter()]
    if spec.draft is not None:
        check_same_tokens(spec.model, tokenizer, spec.draft, load_tokenizer(spec.draft, None))
        drafters.append(ModelDrafter(_load_model(spec.draft, None, spec)))
    target = _load_model(spec.model, spec.revision, spec)
    ids = max(tokenizer.get_vocab().values()) + 1
    if ids > target.vocab_size:
        raise ModelLoadError(
            f"{spec.model}: the tokenizer has {ids} ids and the model scores {target.vocab_size}; expected a tokenizer "
            "of this model, with no more ids than it scores."
        )
    _log.info("%s: KV cache of %s", spec.model, target.kv.memory)
    return LocalEngine(SpeculativeDecoder(target, Cascade(drafters), "auto"), tokenizer)


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """The tokenizer of a model.

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


def check_same_tokens(target: str, target_tokenizer: Any, draft: str, draft_tokenizer: Any) -> None:
    """Make sure that every id means the same to both models.

    Raises:
        IncompatiblePairError: where it does not; names both and an id that differs.
    """
    ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if ours == theirs:
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    example = differing[0]
    raise IncompatiblePairError(
        f"Target {target!r} ({len(ours)} tokens) and draft {draft!r} ({len(theirs)} tokens) have different tokenizers: "
        f"{len(differing)} tokens differ, {example!r} for one has id {ours.get(example)} and {theirs.get(example)}. "
        "A draft must come from the target's own family."
    )


def _load_model(name: str, revision: str | None, spec: PairSpec) -> CausalLM:
    return CausalLM.from_pretrained(
        embedded_path() if name == EMBEDDED else name,
        device=spec.device,
        dtype=spec.dtype,
        revision=revision,
    )
