"""Target and draft have enough tokens in common, or are refused; engines are shared, and told apart by settings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from enumeration import END, letter_tokenizer
from tiny import llama
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from agentspec import (
    CausalLM,
    CrossVocabModel,
    IncompatiblePairError,
    InvalidRequestError,
    LocalEngine,
    ModelLoadError,
    Request,
    SamplingParams,
    SpeculativeDecoder,
)
from agentspec.engine.registry import PairSpec, load_engine, map_vocabulary, shared_engine
from agentspec.models.backends.native import compiles
from agentspec.models.packing import compiled_by
from agentspec.models.switches import Switch
from langchain_agentspec import ChatAgentSpec

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def save(folder: Path, *, head: int, letters: str = "abcdefgh", seed: int = 0, tokenizer: Any = None) -> str:
    """A tiny model whose head scores ``head`` ids, and a tokenizer of single letters."""
    tokenizer = tokenizer or letter_tokenizer([END, *letters])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    llama(seed, vocab_size=head, pad_token_id=None, bos_token_id=None, eos_token_id=0).save_pretrained(folder)
    return str(folder)


def test_padded_heads_are_reconciled_and_padding_is_never_emitted(tmp_path: Path) -> None:
    target = save(tmp_path / "target", head=64)
    draft = save(tmp_path / "draft", head=32, seed=1)
    engine = load_engine(PairSpec(target, draft, device="cpu"))
    assert engine.decoder.target.vocab_size == 9
    assert isinstance(engine.decoder.drafter.models()["model"], CausalLM)
    params = SamplingParams(temperature=5.0, seed=1, max_tokens=60)
    samples = engine.generate([Request([1, 2], params, n=4, gamma=4)])[0]
    assert {token for sample in samples for token in sample.tokens} <= set(range(9))
    assert sum(sample.stats.drafted["model"] for sample in samples) > 0
    engine.close()


def test_an_engine_limits_the_ids_of_its_own_rounds_alone() -> None:
    """A caller's model stays as it is; engines with tokenizers of other sizes over it do not disturb each other."""
    model = CausalLM(llama(0, vocab_size=64, pad_token_id=None, bos_token_id=None, eos_token_id=0))
    alphabets = {"abcdefgh": 9, "abcdefghijklmnop": 17}
    engines = [LocalEngine(SpeculativeDecoder(model), letter_tokenizer([END, *letters])) for letters in alphabets]
    engines.append(LocalEngine(SpeculativeDecoder(model)))
    params = SamplingParams(temperature=50.0, seed=3, max_tokens=60, logprobs=2)
    largest = []
    for engine in engines:
        [samples] = engine.generate([Request([1, 2], params, n=3)])
        largest.append(max(token for sample in samples for token in sample.tokens))
    assert largest[0] in range(5, 9)
    assert largest[1] in range(9, 17)
    assert largest[2] in range(17, 64)
    assert model.vocab_size == 64
    with pytest.raises(InvalidRequestError, match="outside the vocabulary of 9"):
        engines[0].generate([Request([1, 20])])
    for engine in engines:
        engine.close()


def test_a_draft_of_another_tokenizer_drafts_what_both_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = save(tmp_path / "target", head=16)
    draft = save(tmp_path / "draft", head=16, letters="xhgfedcb", seed=1)
    params = SamplingParams(temperature=3.0, seed=7, max_tokens=60)
    requests = [Request([1, 2, 3], params, n=4, gamma=gamma) for gamma in (0, 4)]
    with caplog.at_level(logging.INFO, logger="agentspec"):
        engine = load_engine(PairSpec(target, draft, device="cpu"))
    assert isinstance(engine.decoder.drafter.models()["model"], CrossVocabModel)
    engine.decoder.acceptance = "coupled"
    plain, samples = engine.generate(requests)
    engine.close()
    assert [sample.tokens for sample in samples] == [sample.tokens for sample in plain]
    drafted, accepted = (sum(getattr(s.stats, name)["model"] for s in samples) for name in ("drafted", "accepted"))
    assert drafted > accepted > 0
    assert "8 of 9 (target) and 9 (draft) tokens" in caplog.text


def test_a_quarter_of_the_smaller_vocabulary_is_enough() -> None:
    """3 of 9 tokens here: the end and two letters."""
    ours, theirs = letter_tokenizer([END, *"abcdefgh"]), letter_tokenizer([END, *"abstuvwxyzABCDEFG"])
    for target, draft in ((ours, theirs), (theirs, ours)):
        mapping = map_vocabulary("target", target, "draft", draft)
        assert mapping is not None
        assert len(mapping.shared) == 3
    with pytest.raises(IncompatiblePairError, match=r"2 of 9 .* expected at least 3"):
        map_vocabulary("target", ours, "draft", letter_tokenizer([END, *"astuvwxyz"]))
    assert map_vocabulary("target", ours, "draft", letter_tokenizer([END, *"abcdefgh"])) is None


def test_too_few_tokens_in_common_are_refused_naming_both(tmp_path: Path) -> None:
    target, draft = save(tmp_path / "target", head=16), save(tmp_path / "draft", head=16, letters="stuvwxyz")
    with pytest.raises(IncompatiblePairError, match="1 of 9") as caught:
        load_engine(PairSpec(target, draft, device="cpu"))
    assert target in str(caught.value)
    assert draft in str(caught.value)


def test_tokens_that_cannot_be_compared_are_refused_naming_both(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2}, unk_token="<end>"))
    backend.decoder = decoders.WordPiece()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<end>")
    target, draft = save(tmp_path / "target", head=16), save(tmp_path / "draft", head=16, tokenizer=words)
    with pytest.raises(IncompatiblePairError, match="decodes by WordPiece") as caught:
        load_engine(PairSpec(target, draft, device="cpu"))
    assert target in str(caught.value)
    assert draft in str(caught.value)
    assert map_vocabulary(draft, words, draft, words) is None  # the same tokens need no comparing


def test_a_tokenizer_with_more_ids_than_the_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="9 ids"):
        load_engine(PairSpec(save(tmp_path, head=8), device="cpu"))


@pytest.mark.parametrize("letters", ["abcdefgh", "hgfedcba"], ids=["same tokens", "mapped"])
def test_a_draft_whose_tokenizer_has_more_ids_than_its_head_is_refused(tmp_path: Path, letters: str) -> None:
    target = save(tmp_path / "target", head=16)
    draft = save(tmp_path / "draft", head=8, letters=letters)
    with pytest.raises(ModelLoadError, match=f"{draft}: the tokenizer has 9 ids and the model scores 8"):
        load_engine(PairSpec(target, draft, device="cpu"))


@pytest.mark.parametrize("field", ["model", "draft"])
def test_an_unknown_model_is_refused_by_name(tmp_path: Path, field: str) -> None:
    known = save(tmp_path / "known", head=16)
    spec: dict[str, Any] = {"model": known, field: str(tmp_path / "nowhere")}
    with pytest.raises(ModelLoadError, match="nowhere"):
        load_engine(PairSpec(**spec))


def test_engines_are_shared_by_what_makes_them_the_same(tmp_path: Path) -> None:
    name = save(tmp_path, head=16)
    spec = PairSpec(name, device="cpu")
    engine = shared_engine(spec)
    assert shared_engine(PairSpec(name, device="cpu")) is engine
    other = shared_engine(PairSpec(name, device="cpu", dtype="bfloat16"))
    assert other is not engine
    assert isinstance(other.decoder.target, CausalLM)
    assert other.decoder.target.dtype == torch.bfloat16
    engine.close()
    assert shared_engine(spec) is not engine  # a closed one is replaced
    other.close()
    shared_engine(spec).close()


def test_what_is_compiled_tells_engines_apart_and_is_handed_to_the_model(tmp_path: Path) -> None:
    name = save(tmp_path, head=16)
    engine = shared_engine(PairSpec(name, device="cpu"))
    other = shared_engine(PairSpec(name, device="cpu", native_kernels=False))
    assert other is not engine
    for found, is_compiled in ((engine, compiles("auto")), (other, False)):
        assert isinstance(found.decoder.target, CausalLM)
        assert (compiled_by(found.decoder.target.model) is not None) == is_compiled
        found.close()
    models = [ChatAgentSpec(model=name, device="cpu", native_kernels=wanted) for wanted in ("auto", False)]
    assert models[0].identity() != models[1].identity()


@pytest.mark.parametrize(("old", "new"), [("auto", "auto"), (True, "auto"), (False, False)])
def test_compile_is_the_old_name_of_two_settings(old: Switch, new: Switch) -> None:
    made = (
        lambda: PairSpec("somewhere", compile=old),
        lambda: ChatAgentSpec(model="somewhere", compile=old),  # type: ignore[call-arg]
        lambda: CausalLM(llama(), compile=old),
    )
    found: list[Any] = []
    for make in made:
        with pytest.warns(DeprecationWarning, match=r"cuda_graphs \(on CUDA\) and native_kernels") as warned:
            found.append(make())
        assert [warning.filename for warning in warned] == [__file__]  # the line that gave it is named
    assert found[0] == PairSpec("somewhere", cuda_graphs=new, native_kernels=new)
    assert (found[1].cuda_graphs, found[1].native_kernels) == (new, new)


@pytest.mark.parametrize("name", ["cuda_graphs", "native_kernels"])
def test_compile_beside_a_setting_that_replaces_it_is_refused(name: str) -> None:
    for make in (PairSpec, ChatAgentSpec):
        with pytest.raises(ValueError, match="expected these without it"):
            make(model="somewhere", compile=True, **{name: False})  # type: ignore[operator]
        with pytest.raises(ValueError, match=f"{name} must be one of 'auto', True, False, got 'maybe'|Input should be"):
            make(model="somewhere", **{name: "maybe"})  # type: ignore[operator]
