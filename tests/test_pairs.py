"""Target and draft speak the same tokens, or are refused; engines are shared; settings of a pair tell engines apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentspec import CausalLM, IncompatiblePairError, ModelLoadError, Request, SamplingParams
from agentspec.pairs import PairSpec, load_engine, shared_engine

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def save(folder: Path, *, head: int, letters: str = "abcdefgh", seed: int = 0) -> str:
    """A tiny model whose head scores ``head`` ids, and a tokenizer of single letters."""
    tokens = {token: index for index, token in enumerate(["<end>", *letters])}
    backend = Tokenizer(models.WordLevel(tokens, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", unk_token="<end>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    llama(seed, vocab_size=head, pad_token_id=None, bos_token_id=None, eos_token_id=0).save_pretrained(folder)
    return str(folder)


def test_padded_heads_are_reconciled_and_padding_is_never_emitted(tmp_path: Path) -> None:
    target = save(tmp_path / "target", head=64)
    draft = save(tmp_path / "draft", head=32, seed=1)
    engine = load_engine(PairSpec(target, draft, device="cpu"))
    assert engine.decoder.target.vocab_size == 9
    params = SamplingParams(temperature=5.0, seed=1, max_tokens=60)
    samples = engine.generate([Request([1, 2], params, n=4, gamma=4)])[0]
    assert {token for sample in samples for token in sample.tokens} <= set(range(9))
    assert sum(sample.stats.drafted["model"] for sample in samples) > 0
    engine.close()


def test_another_tokenizer_is_refused_naming_both(tmp_path: Path) -> None:
    target, draft = save(tmp_path / "target", head=16), save(tmp_path / "draft", head=16, letters="abcdefgx")
    with pytest.raises(IncompatiblePairError) as caught:
        load_engine(PairSpec(target, draft, device="cpu"))
    assert target in str(caught.value)
    assert draft in str(caught.value)
    assert "'h'" in str(caught.value)


def test_a_tokenizer_with_more_ids_than_the_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="9 ids"):
        load_engine(PairSpec(save(tmp_path, head=8), device="cpu"))


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
