"""Sweep over all causal architectures that transformers knows: tiny random models against their own uncached passes.

``python tests/architectures.py`` writes ``docs/architectures.md``; tests/system/test_architectures.py checks it.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from architecture_sizes import ABSENT, OVERRIDES, SIZES, VARIANTS, Variant
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from agentspec.errors import ModelLoadError
from agentspec.models.causal_lm import CausalLM

PAGE = Path(__file__).resolve().parents[1] / "docs" / "architectures.md"
ARCHITECTURES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

LENGTH = 300
_MOST_PARAMETERS = 20_000_000
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.15}
_STEPS = (1, 5, 1, 8, 2, 3, 1, 16, 4, 1)


@dataclass(frozen=True)
class Outcome:
    """What came of an architecture: "served", "refused" or "not tried", and by which pass, or why."""

    status: str
    detail: str


class NotTriedError(Exception):
    """No small model of this architecture can be made here; says why."""


class WrongScoresError(AssertionError):
    """A model was served, and its logits are not its own."""


def try_architecture(name: str) -> Outcome:
    """Serve a tiny model of an architecture. Raises ``WrongScoresError`` where it is served and wrong."""
    return _outcome(name, Variant(name))


def try_variant(name: str) -> Outcome:
    """Serve a tiny model of one of ``VARIANTS``. Raises ``WrongScoresError`` where it is served and wrong."""
    return _outcome(VARIANTS[name].architecture, VARIANTS[name])


def _outcome(name: str, variant: Variant) -> Outcome:
    try:
        with quiet():
            model = build(name, variant)
            return Outcome("served", _serve(model, variant))
    except NotTriedError as reason:
        return Outcome("not tried", _steady(str(reason)))
    except ModelLoadError as reason:
        return Outcome("refused", _steady(str(reason)))


def _steady(text: str) -> str:
    """A reason without what differs between machines: folders and measured numbers; in one line, for a table."""
    text = re.sub(r"/\S*/(?=\w+\.json)|/\S+: ", "", text)
    return re.sub(r"\b\d\.\de[+-]\d\d of", "some of", " ".join(text.split())).replace("|", "/")[:300]


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers says of configs that are meant to be odd."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=".*of the checkpoint belong to no part")
            yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


# --- tiny models ----------------------------------------------------------------------------------------------------


def build(name: str, variant: Variant) -> PreTrainedModel:
    """A seeded random model whose logits depend on all of its weights. Raises ``NotTriedError``."""
    try:
        config = tiny_config(name, variant.fields)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    except Exception as error:
        raise NotTriedError(f"no small config: {type(error).__name__}: {error}") from error
    if size > _MOST_PARAMETERS:
        raise NotTriedError(f"no small config: {size:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(variant.dtype).eval()
        _randomise(model)
    return model


def tiny_config(name: str, fields: Mapping[str, Any]) -> PreTrainedConfig:
    """The config of an architecture in small: of ``SIZES`` the fields that its family declares."""
    kind = CONFIG_MAPPING[name]
    sizes = {field: value for field, value in SIZES.items() if declares(kind, field)}
    parts = {part: _part_config(kind, part) for part in getattr(kind, "sub_configs", {})}
    known = {part: sizes for part, sizes in parts.items() if sizes is not None}
    given = {**known, **sizes, **OVERRIDES.get(name, {}), **fields}
    return kind(**{field: value for field, value in given.items() if value is not ABSENT})


def _part_config(kind: type[PreTrainedConfig], part: str) -> dict[str, Any] | None:
    """The sizes of a part of a composite: a text model, a vision tower."""
    of = kind.sub_configs[part]
    if not isinstance(of, type) or not issubclass(of, PreTrainedConfig) or not hasattr(of, "model_type"):
        return None
    sizes = {field: value for field, value in SIZES.items() if declares(of, field)}
    return {**sizes, **OVERRIDES.get(of.model_type, {})}


def declares(kind: type[PreTrainedConfig], field: str) -> bool:
    """Whether a family's config has a field, under its own or its family's name."""
    named = getattr(kind, "attribute_map", {}).get(field, field)
    return hasattr(kind, named) or named in inspect.signature(kind.__init__).parameters


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Weights by which every layer matters to the logits."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0, 1.6 / weight.shape[-1] ** 0.5)
        elif "norm" in name.lower():
            weight.add_(torch.randn_like(weight) * 0.1)
        else:
            weight.normal_(0, 0.1)


# --- serving --------------------------------------------------------------------------------------------------------


def _serve(model: PreTrainedModel, variant: Variant) -> str:
    """Serve a model in blocks, drafts, forks and evictions, and compare every score. Returns which pass computed it."""
    size = min(model.get_input_embeddings().weight.shape[0], 150)
    rng = torch.Generator().manual_seed(1)
    left = torch.randint(3, size, (LENGTH,), generator=rng).tolist()
    right = left[: LENGTH // 2] + torch.randint(3, size, (LENGTH - LENGTH // 2,), generator=rng).tolist()
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            reference = AutoModelForCausalLM.from_pretrained(folder, dtype=variant.dtype, attn_implementation="eager")
            expected = [_uncached(reference.eval(), context) for context in (left, right)]
        except Exception as error:
            raise NotTriedError(f"transformers itself fails: {type(error).__name__}: {error}") from error
        options = {"rows": 3, "prefill_chunk": 64, **variant.options}
        lm = CausalLM.from_pretrained(folder, dtype=variant.dtype, device="cpu", **options)
    check = _Comparison(lm, {"left": (left, expected[0]), "right": (right, expected[1])}, variant)
    check.run()
    return passes_of(lm)


def _uncached(model: PreTrainedModel, context: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([context]), use_cache=False).logits[0].float()
    if not logits.isfinite().all():
        raise ValueError("logits are not finite")
    return logits


def passes_of(lm: CausalLM) -> str:
    """Which forward computes a model: our compiled one, our own loop over its layers, or transformers' modules."""
    if lm._forward._compiled is not None:
        return "native"
    return "flat" if lm._forward._direct is not None else "transformers"


@dataclass(frozen=True)
class _Comparison:
    lm: CausalLM
    known: Mapping[str, tuple[list[int], Tensor]]
    variant: Variant

    def run(self) -> None:
        self.ask(("left", LENGTH, LENGTH))
        self.lm.kv.clear()
        reached = LENGTH - 60
        self.ask(("left", reached, 0))
        for step in _STEPS:
            if reached + step > LENGTH:
                break
            self.ask(("left", reached, 1), ("right", reached - 7, 1), draft=[3] * 5)  # a draft that is rejected
            self.ask(("left", reached + step, step), ("right", reached, 4))
            reached += step
        for other in range(4):
            self.lm.next_logits([[5 + other] * (40 + other)], [1])
        self.ask(("right", LENGTH, 10), ("left", LENGTH, 20))
        self.lm.kv.check_integrity()

    def ask(self, *asked: tuple[str, int, int], draft: list[int] | None = None) -> None:
        """Ask for the last logits of prefixes (name, length, last), behind the first of them a draft of no use."""
        contexts, last = [self.known[name][0][:length] for name, length, _ in asked], [count for *_, count in asked]
        if draft:
            contexts[0], last[0] = contexts[0] + draft, last[0] + len(draft)
        found = self.lm.next_logits(contexts, last).values
        for row, (name, length, count) in enumerate(asked):
            self.compare(found[row, :count], self.known[name][1][length - count : length])

    def compare(self, found: Tensor, expected: Tensor) -> None:
        if not len(found):
            return
        expected = expected[:, : found.shape[-1]]
        off = float((found - expected).abs().max() / expected.abs().max())
        same = self.variant.dtype != torch.float32 or bool((found.argmax(-1) == expected.argmax(-1)).all())
        if not (off <= _TOLERANCE[self.variant.dtype] and same):
            raise WrongScoresError(f"{self.variant.architecture}: logits differ by {off:.1e}, same argmax: {same}")


# --- the page -------------------------------------------------------------------------------------------------------

_TITLE = f"""# Architectures

Made by `python tests/architectures.py` with transformers {transformers.__version__}, and checked by
`tests/system/test_architectures.py`. A tiny random model of each architecture is served in float32 on a CPU, in ragged
blocks, with rejected drafts, forks and evictions, over {LENGTH} tokens; logits are compared with those of
transformers' own uncached pass (largest difference {_TOLERANCE[torch.float32]:.0e} of the largest logit, every
argmax equal; {_TOLERANCE[torch.bfloat16]} in bfloat16).
`native`, `flat` and `transformers` say which pass computes a served model: the compiled one, one loop over the layers'
weights, or transformers' own modules over agentspec's cache.
"""


def page(architectures: Mapping[str, Outcome], variants: Mapping[str, Outcome]) -> str:
    """The page of results."""
    served = {name: found for name, found in architectures.items() if found.status == "served"}
    others = {name: found for name, found in architectures.items() if found.status != "served"}
    parts = [
        _TITLE,
        f"## Served: {len(served)}\n\n{_table(('architecture', 'status', 'passes'), served)}",
        f"## Not served: {len(others)}\n\n{_table(('architecture', 'status', 'reason'), others)}",
        f"## Variants: {len(variants)}\n\n{_table(('variant', 'status', 'passes or reason'), variants)}",
    ]
    return "\n".join(parts)


def _table(heads: tuple[str, str, str], rows: Mapping[str, Outcome]) -> str:
    lines = [heads, ("---",) * 3, *((f"`{name}`", found.status, found.detail) for name, found in rows.items())]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def read_page(text: str) -> tuple[str, dict[str, Outcome]]:
    """The version of transformers that a page was made with, and its outcomes by name."""
    version = re.search(r"with transformers (\S+?),", text)
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.*) \|$", text, re.MULTILINE)
    return version[1] if version else "", {name: Outcome(status, detail) for name, status, detail in rows}


def main() -> None:
    """Write the page."""
    torch.set_num_threads(min(2, torch.get_num_threads()))
    found = {name: _shown(name, try_architecture(name)) for name in ARCHITECTURES}
    variants = {name: _shown(name, try_variant(name)) for name in VARIANTS}
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(found, variants), encoding="utf-8")


def _shown(name: str, outcome: Outcome) -> Outcome:
    print(f"{name:40} {outcome.status:10} {outcome.detail}", file=sys.stderr, flush=True)
    return outcome


if __name__ == "__main__":
    main()
