"""Drafts of another tokenizer: contexts are told in the draft's tokens, and only shared tokens are drafted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from enumeration import END, CachingTable, letter_tokenizer
from tiny import llama
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from agentspec import (
    CausalLM,
    CrossVocabModel,
    Grammar,
    IncompatiblePairError,
    LocalEngine,
    ModelDrafter,
    Request,
    SamplingParams,
    SpeculativeDecoder,
    VocabMapping,
)
from agentspec.models import LanguageModel
from agentspec.models.cross_vocab.mapping import BLOCK
from agentspec.runtime.tokens import token_bytes

CORPUS = [
    "The weather in Paris is sunny, and the weather in Rome is not. Nobody weathers a speculative winter there.",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n\tnaïve 💡 über allem, "ok": true',
]
OTHER_CORPUS = [
    "Speculation is a whether or not. Sunny days are counted; winters are not counted in Paris.",
    'def spec(winter: str) -> None:\n    return {"days": [1, 2, 3], "city": winter, "💡": "💡"}',
]
TEXTS = [*CORPUS, *OTHER_CORPUS, "  two  spaces\n\n", "é", "a", "日本語 テキスト", "\x00"]


def bpe(corpus: Sequence[str] = (), size: int = 400, special: Sequence[str] = (END,), **roles: str) -> Any:
    """Byte-level BPE, trained on a corpus; without one, its tokens are bytes and the special ones."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": END, **roles})


def sentencepiece(words: Sequence[str], *, with_bytes: bool = True) -> Any:
    """A tokenizer in the form of Llama 2: it puts a space before every text, and its tokens before all texts a mark."""
    alphabet = sorted({letter for word in words for letter in word} | {"▁"})
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []
    merges: list[tuple[str, str]] = []
    for word in words:
        merges += [pair for k in range(1, len(word)) if (pair := (word[:k], word[k])) not in merges]
    names = dict.fromkeys(["<unk>", "<s>", "</s>", *bytes_, *alphabet, *("".join(pair) for pair in merges)])
    vocab = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=with_bytes, fuse_unk=False))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


WORDS = ("▁the", "▁weather", "▁is", "▁Paris", "▁sunny", "ing", "▁not")
TOKENIZERS = {
    "bytes": functools.cache(bpe),
    "bpe": functools.cache(lambda: bpe(CORPUS)),
    "other bpe": functools.cache(lambda: bpe(OTHER_CORPUS, 350)),
    "sentencepiece": functools.cache(lambda: sentencepiece(WORDS)),
}


def written(tokenizer: Any, ids: Sequence[int]) -> bytes:
    of = token_bytes(tokenizer, max(tokenizer.get_vocab().values()) + 1)
    return b"".join(of[i] or b"" for i in ids)


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


# What a context becomes


@pytest.mark.parametrize("pair", [*itertools.permutations(TOKENIZERS, 2)], ids=" to ".join)
def test_a_mapped_context_writes_the_same(pair: tuple[str, str]) -> None:
    ours, theirs = (TOKENIZERS[name]() for name in pair)
    mapping = VocabMapping(ours, theirs)
    for text in TEXTS:
        ids = plain_ids(ours, text)
        for stop in range(1, len(ids) + 1):
            assert written(theirs, mapping(ids[:stop])) == written(ours, ids[:stop])


def test_a_text_is_spelled_as_the_drafts_tokenizer_spells_it() -> None:
    ours, theirs = TOKENIZERS["bpe"](), TOKENIZERS["other bpe"]()
    mapping = VocabMapping(ours, theirs)
    for text in (*CORPUS, *OTHER_CORPUS):
        assert len(plain_ids(ours, text)) <= BLOCK
        assert mapping(plain_ids(ours, text)) == plain_ids(theirs, text)
        assert mapping([ours.get_vocab()[END], *plain_ids(ours, text)])[1:] == plain_ids(theirs, text)


def test_a_space_that_the_drafts_tokenizer_adds_is_the_texts_own() -> None:
    ours, theirs = TOKENIZERS["bytes"](), sentencepiece(["er", "▁the"])
    mapping = VocabMapping(ours, theirs)
    spelled = plain_ids(theirs, "there")
    assert [theirs.decode([i]) for i in spelled] == [" th", "er", "e"]  # and not its longest tokens
    assert mapping(plain_ids(ours, " there")) == [theirs.bos_token_id, *spelled]
    assert written(theirs, mapping(plain_ids(ours, "there"))) == b"there"


def test_a_context_that_grows_changes_its_last_word_alone() -> None:
    ours, theirs = TOKENIZERS["bpe"](), TOKENIZERS["other bpe"]()
    mapping = VocabMapping(ours, theirs)
    ids = plain_ids(ours, " ".join(CORPUS * 12))
    assert len(ids) > 2 * BLOCK
    letters = max(len(word) for word in " ".join(CORPUS).split(" ")) + 1
    for stop in range(1, len(ids)):
        before, after = mapping(ids[:stop]), mapping(ids[: stop + 1])
        kept = next((k for k, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        assert len(written(theirs, before[kept:])) <= letters


def test_pieces_of_a_character_become_the_drafts_bytes_and_then_its_character() -> None:
    mapping = VocabMapping(TOKENIZERS["bytes"](), TOKENIZERS["other bpe"]())
    ours, theirs = TOKENIZERS["bytes"](), TOKENIZERS["other bpe"]()
    pieces = plain_ids(ours, "💡")
    assert len(pieces) == 4
    assert mapping(pieces) == plain_ids(theirs, "💡")
    assert len(mapping(pieces)) < 4
    assert written(theirs, mapping(pieces[:3])) == "💡".encode()[:3]
    letters = VocabMapping(ours, sentencepiece(["▁a"], with_bytes=False))
    assert letters([*plain_ids(ours, "a"), *pieces[:2]]) == letters(plain_ids(ours, "a"))  # no token for them: left out


def test_a_context_that_maps_to_nothing_becomes_a_mark() -> None:
    mapping = VocabMapping(letter_tokenizer(["a", "b", END]), letter_tokenizer([END, "b"]))
    assert mapping([0, 0]) == [0]
    assert mapping([0, 1, 0]) == [1]


def test_special_tokens_become_those_of_the_same_name_or_use_or_their_name() -> None:
    ours = bpe(CORPUS, special=["<s>", END, "<|turn|>", "<|mine|>"], bos_token="<s>")
    theirs = bpe(OTHER_CORPUS, special=["<pad>", "<|turn|>", "<stop>"], eos_token="<stop>")
    mapping, name = VocabMapping(ours, theirs), ours.convert_tokens_to_ids
    assert mapping([name("<|turn|>")]) == [theirs.convert_tokens_to_ids("<|turn|>")]
    assert mapping([name(END)]) == [theirs.eos_token_id]
    assert mapping.shared[name(END)] == theirs.eos_token_id
    assert mapping([name("<|mine|>")]) == plain_ids(theirs, "<|mine|>")
    assert name("<|mine|>") not in mapping.shared
    spelled = [*plain_ids(ours, "<|"), *plain_ids(ours, "turn"), *plain_ids(ours, "|>")]  # the text is no mark
    assert theirs.convert_tokens_to_ids("<|turn|>") not in mapping(spelled)
    assert written(theirs, mapping(spelled)) == b"<|turn|>"


def test_an_end_of_the_draft_stands_for_one_of_the_target() -> None:
    """Where both have the target's end, the draft's own end has no twin, though contexts know it."""
    ours = bpe(CORPUS, special=[END, "<stop>"])
    theirs = bpe(OTHER_CORPUS, special=["<stop>", "<other>"], eos_token="<stop>")
    mapping = VocabMapping(ours, theirs)
    assert mapping.shared[ours.convert_tokens_to_ids("<stop>")] == theirs.eos_token_id
    assert ours.eos_token_id not in mapping.shared
    assert mapping([ours.eos_token_id]) == [theirs.eos_token_id]


def test_a_draft_gets_its_own_beginning_once() -> None:
    plain, begun = bpe(CORPUS), sentencepiece(WORDS)
    lead = begun.bos_token_id
    mapping = VocabMapping(plain, begun)
    assert mapping(plain_ids(plain, "the"))[0] == lead
    assert mapping(plain_ids(plain, "the")).count(lead) == 1
    same = VocabMapping(begun, sentencepiece([*WORDS, "▁more"]))
    assert same([lead, *plain_ids(begun, "the")]) == same(plain_ids(begun, "the"))
    away = VocabMapping(begun, plain)  # which puts nothing before a text
    assert away([lead, *plain_ids(begun, "the")]) == away(plain_ids(begun, "the"))


@pytest.mark.parametrize("name", ["other bpe", "sentencepiece"])
def test_words_are_whole_where_their_last_token_is_there(name: str) -> None:
    ours = TOKENIZERS["bpe"]()
    mapping = VocabMapping(ours, TOKENIZERS[name]())
    context = plain_ids(ours, " ".join(CORPUS * 5))
    texts = [written(ours, [token]) for token in context]
    starts = [k for k, text in enumerate(texts) if k and len(text) > 1 and text.startswith(b" ")]
    ends = {len(mapping(context[:stop])): stop for stop in sorted([*starts, BLOCK, len(context)])}
    assert len(context) > BLOCK
    for length in range(len(mapping(context)) + 1):
        assert mapping.whole_tokens(context, length) == max((ends[n] for n in ends if n <= length), default=0)
    assert mapping.whole_tokens([], 3) == 0


def test_tokens_are_shared_one_to_one_where_they_write_the_same() -> None:
    for first, second in itertools.permutations(TOKENIZERS, 2):
        ours, theirs = TOKENIZERS[first](), TOKENIZERS[second]()
        shared = VocabMapping(ours, theirs).shared
        assert len(set(shared.values())) == len(shared) > 250
        ends = shared.pop(ours.eos_token_id), theirs.eos_token_id
        assert ends[0] == ends[1]
        assert all(written(ours, [i]) == written(theirs, [twin]) != b"" for i, twin in shared.items())
    ours, theirs = bpe(CORPUS), bpe()
    assert len(plain_ids(ours, " weather")) == 1  # and then another token of the same bytes
    ours.add_special_tokens({"additional_special_tokens": [" weather"]})
    theirs.add_tokens([AddedToken(" weather", special=False)])
    shared = VocabMapping(ours, theirs).shared
    assert len(set(shared.values())) == len(shared)
    # A letter that has a token of its own and one as a byte is the one that texts are made of.
    theirs = TOKENIZERS["sentencepiece"]()
    shared = VocabMapping(TOKENIZERS["bpe"](), theirs).shared
    assert shared[plain_ids(TOKENIZERS["bpe"](), "a")[0]] == theirs.get_vocab()["a"]
    assert shared[plain_ids(TOKENIZERS["bpe"](), " ")[0]] == theirs.get_vocab()["▁"]
    assert shared[plain_ids(TOKENIZERS["bpe"](), "q")[0]] == theirs.get_vocab()["<0x71>"]


def test_added_tokens_that_are_text_are_found_by_name() -> None:
    ours, theirs = bpe(CORPUS), bpe(OTHER_CORPUS)
    ours.add_tokens([AddedToken("<call>", special=False)])
    theirs.add_special_tokens({"additional_special_tokens": ["<call>"]})
    mapping = VocabMapping(ours, theirs)
    token, twin = ours.convert_tokens_to_ids("<call>"), theirs.convert_tokens_to_ids("<call>")
    assert mapping.shared[token] == twin
    assert mapping([*plain_ids(ours, "so"), token]) == [*plain_ids(theirs, "so"), twin]


# The model


def permuted(seed: int = 0) -> tuple[CausalLM, CrossVocabModel, Any]:
    """A tiny model over bytes, and the same one with its ids in another order."""
    ours = bpe()
    size = len(ours)
    vocab = ours.backend_tokenizer.get_vocab(with_added_tokens=False)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))  # old id -> new id
    backend = Tokenizer(models.BPE({token: int(order[i]) for token, i in vocab.items()}, []))
    backend.pre_tokenizer, backend.decoder = ours.backend_tokenizer.pre_tokenizer, decoders.ByteLevel()
    backend.add_special_tokens([END])
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    sizes = {"vocab_size": size, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    module, twin = llama(1, **sizes), llama(1, **sizes)
    twin.model.embed_tokens.weight.data[order] = module.model.embed_tokens.weight.data
    twin.lm_head.weight.data[order] = module.lm_head.weight.data
    return CausalLM(module), CrossVocabModel(CausalLM(twin), VocabMapping(ours, theirs)), ours


def test_the_same_model_behind_other_ids_is_always_right() -> None:
    target, draft, tokenizer = permuted()
    assert draft.mapping.shared != {i: i for i in draft.mapping.shared}
    prompts = [plain_ids(tokenizer, text) for text in TEXTS[:4]]
    assert torch.allclose(
        draft.next_logits(prompts, [3] * 4).values, target.next_logits(prompts, [3] * 4).values, atol=1e-4
    )
    engine = LocalEngine(SpeculativeDecoder(target, ModelDrafter(draft), gamma=4), tokenizer)
    params = SamplingParams(temperature=0, max_tokens=40)
    samples = [one for (one,) in engine.generate([Request(prompt, params) for prompt in prompts])]
    engine.close()
    drafted = sum(sample.stats.drafted["model"] for sample in samples)
    assert drafted > 100
    assert sum(sample.stats.accepted["model"] for sample in samples) == drafted


def table(seed: int = 0) -> tuple[CachingTable, CrossVocabModel]:
    """A table over the ids of "other bpe", and the same for the ids of "bpe"."""
    inner = CachingTable(len(TOKENIZERS["other bpe"]()), seed=seed, order=1)
    return inner, CrossVocabModel(inner, VocabMapping(TOKENIZERS["bpe"](), TOKENIZERS["other bpe"]()))


def test_logits_of_shared_tokens_are_the_drafts_after_the_mapped_context() -> None:
    inner, model = table()
    contexts = [plain_ids(TOKENIZERS["bpe"](), text) for text in TEXTS]
    last = [min(len(context), 1 + row) for row, context in enumerate(contexts)]
    last[2] = 0
    logits = model.next_logits(contexts, last).values
    assert logits.shape == (len(contexts), max(last), len(TOKENIZERS["bpe"]()))
    respelled = 0
    for row, (context, count) in enumerate(zip(contexts, last, strict=True)):
        whole = model.mapping(context)
        for k in range(count):
            ids = model.mapping(context[: len(context) - count + 1 + k])
            respelled += whole[: len(ids)] != ids
            expected = inner.logits(ids)
            for token in range(model.vocab_size):
                twin = model.mapping.shared.get(token)
                assert logits[row, k, token] == (float("-inf") if twin is None else expected[twin])
    assert respelled  # some words were spelled otherwise before they went on
    assert torch.isfinite(logits[0, 0]).sum() == model.shared_tokens == len(model.mapping.shared)
    assert model.next_logits([], []).values.shape[-1] == model.vocab_size
    assert model.next_logits(contexts[:2], [0, 0]).values.shape == (2, 0, model.vocab_size)


def test_ids_beyond_the_drafts_head_are_left_out() -> None:
    mapping = VocabMapping(TOKENIZERS["bpe"](), TOKENIZERS["other bpe"]())
    head = max(mapping.shared.values())  # one more has no score
    model = CrossVocabModel(CachingTable(head, order=1), mapping)
    assert model.shared_tokens == len(mapping.shared) - 1
    contexts = [plain_ids(TOKENIZERS["bpe"](), text) for text in TEXTS]
    fits = [max(mapping(context)) < head for context in contexts]
    assert len(set(fits)) == 2
    assert [model.can_read(context) for context in contexts] == fits
    assert not model.can_read([model.vocab_size])
    known = [context for context in contexts if model.can_read(context)]
    logits = model.next_logits(known, [1] * len(known)).values
    assert torch.isfinite(logits).sum(-1).unique().tolist() == [model.shared_tokens]


@pytest.fixture
def pair() -> tuple[CausalLM, CrossVocabModel]:
    """Two tiny random models: the target speaks "bpe", the draft "other bpe"."""
    ours, theirs = TOKENIZERS["bpe"](), TOKENIZERS["other bpe"]()
    ends = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    draft = CausalLM(llama(2, vocab_size=len(theirs), **ends))
    return CausalLM(llama(1, vocab_size=len(ours), **ends)), CrossVocabModel(draft, VocabMapping(ours, theirs))


def test_it_is_a_caching_model_in_the_targets_tokens(pair: tuple[CausalLM, CrossVocabModel]) -> None:
    target, draft = pair
    assert isinstance(draft, LanguageModel)
    assert (draft.vocab_size, draft.max_running, draft.device) == (target.vocab_size, 8, torch.device("cpu"))
    assert isinstance(draft.model, CausalLM)
    assert draft.fingerprint is not None
    assert draft.fingerprint != draft.model.fingerprint
    context = plain_ids(TOKENIZERS["bpe"](), CORPUS[0])
    assert draft.cached_tokens(context) == draft.cached_tokens([]) == 0
    draft.next_logits([context], [1])
    assert draft.cached_tokens(context) == len(context)
    for stop in range(1, len(context)):
        held = draft.cached_tokens(context[:stop])
        ids = draft.mapping(context[:held]) if held else []
        assert len(ids) <= draft.model.cached_tokens(draft.mapping(context[:stop]))
        word = written(TOKENIZERS["bpe"](), context[held:stop])
        assert b" " not in word[1:]  # what is missing is the last word at most
    longest = max(range(draft.vocab_size), key=lambda token: len(written(TOKENIZERS["bpe"](), [token])))
    assert draft.can_read([longest] * draft.max_context)


def test_nothing_is_cached_of_what_cannot_be_read(pair: tuple[CausalLM, CrossVocabModel]) -> None:
    _, draft = pair
    assert draft.cached_tokens([1, draft.vocab_size]) == 0
    assert not draft.can_read([1, draft.vocab_size])


def test_what_was_read_is_not_read_again(pair: tuple[CausalLM, CrossVocabModel]) -> None:
    _, draft = pair
    assert isinstance(draft.model, CausalLM)
    context = plain_ids(TOKENIZERS["bpe"](), CORPUS[0])
    draft.next_logits([context[:-8]], [1])
    for stop in range(len(context) - 7, len(context) + 1):
        before = draft.model.computed_tokens
        draft.next_logits([context[:stop]], [1])
        assert draft.model.computed_tokens - before <= 12  # the last word, letter by letter


def sampled(target: Any, drafter: Any, requests: list[Request], **decoder: Any) -> tuple[list[Any], int, int]:
    """Texts, and how many tokens the draft model drafted and got accepted."""
    engine = LocalEngine(SpeculativeDecoder(target, drafter, **decoder), TOKENIZERS["bpe"]())
    samples = [sample for group in engine.generate(requests) for sample in group]
    engine.close()
    counts = [(s.stats.drafted["model"], s.stats.accepted["model"]) for s in samples]
    drafted, accepted = (sum(column) for column in zip(*counts, strict=True))
    return [sample.tokens for sample in samples], drafted, accepted


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_a_draft_of_another_vocabulary_changes_nothing(
    pair: tuple[CausalLM, CrossVocabModel], temperature: float
) -> None:
    target, draft = pair
    prompts = [plain_ids(TOKENIZERS["bpe"](), text) for text in TEXTS]
    requests = [
        Request(prompt, SamplingParams(temperature=temperature, seed=row, max_tokens=30))
        for row, prompt in enumerate(prompts)
    ]
    plain, _, _ = sampled(target, None, requests, acceptance="coupled")
    texts, drafted, _ = sampled(target, ModelDrafter(draft), requests, acceptance="coupled", gamma=3)
    assert texts == plain
    assert drafted > 100


def test_masks_are_the_targets(pair: tuple[CausalLM, CrossVocabModel]) -> None:
    """Under a grammar what is drafted is legal, and nothing is where no shared token is."""
    target, draft = pair
    grammar = Grammar.regex(r'(weather|Zürich|💡|naïve|"[0-9]{2}"){3,4}')
    requests = [
        Request(plain_ids(TOKENIZERS["bpe"](), "Say"), SamplingParams(seed=seed, max_tokens=60), grammar=grammar)
        for seed in range(8)
    ]
    plain, _, _ = sampled(target, None, requests, acceptance="coupled")
    texts, drafted, accepted = sampled(target, ModelDrafter(draft), requests, acceptance="coupled", gamma=4)
    assert texts == plain
    assert len(set(texts)) > 4
    unmasked = sampled(target, ModelDrafter(draft, masked=False), requests, acceptance="coupled", gamma=4)
    assert unmasked[0] == plain
    assert accepted / drafted > unmasked[2] / unmasked[1]


def test_nothing_is_drafted_beyond_the_drafts_context() -> None:
    ours, theirs = TOKENIZERS["bpe"](), TOKENIZERS["bytes"]()
    ends = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    target = CausalLM(llama(1, vocab_size=len(ours), **ends))
    short = CausalLM(llama(2, vocab_size=len(theirs), max_position_embeddings=80, **ends))
    draft = CrossVocabModel(short, VocabMapping(ours, theirs))
    prompts = [plain_ids(ours, " the weather" * n) for n in (2, 6, 7, 12)]
    assert [draft.can_read(prompt) for prompt in prompts] == [True, True, False, False]
    assert max(map(len, prompts)) < 80
    requests = [Request(prompt, SamplingParams(temperature=0, max_tokens=60)) for prompt in prompts]
    plain, _, _ = sampled(target, None, requests)
    texts, drafted, _ = sampled(target, ModelDrafter(draft), requests, gamma=2)
    assert texts == plain
    assert drafted > 0
    assert sampled(target, ModelDrafter(draft), requests[2:], gamma=2)[1] == 0


def test_a_draft_that_reads_hardly_a_token_is_refused() -> None:
    mapping = VocabMapping(TOKENIZERS["bpe"](), TOKENIZERS["sentencepiece"]())
    inner = CachingTable(mapping.target_ids)
    inner.max_context = 1 + 2 * mapping.longest  # the draft's own first token, and two of the target
    assert CrossVocabModel(inner, mapping).max_context == 2
    inner.max_context -= 1
    with pytest.raises(IncompatiblePairError, match=f"reads {inner.max_context} tokens"):
        CrossVocabModel(inner, mapping)
