"""Texts in sampling parameters become token sequences, and then have their effect, in the LLM as in the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.request import ParameterError
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.text.words import MAX_WORD, resolve


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> Tokenizer:
    return load_tokenizer(data / "arch" / "llama")


@pytest.fixture(scope="module")
def llm(data: Path) -> LLM:
    return LLM(str(data / "arch" / "llama"), num_threads=1)


def test_words_are_banned_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    ids = resolve(SamplingParams(bad_words=["Hello", " there"], bad_word_ids=[[7, 8]]), tokenizer).bad_word_ids
    assert ids[0] == [7, 8]
    assert [tokenizer.decode(s, continues=True) for s in ids[1:]] == ["Hello", " Hello", " there"]


def test_breakers_are_every_token_that_has_them(tokenizer: Tokenizer) -> None:
    params = SamplingParams(dry_multiplier=1, dry_sequence_breakers=["the"])
    ids = resolve(params, tokenizer).dry_breaker_ids
    single = {s[0] for s in ids if len(s) == 1}
    assert single == {t for t in range(tokenizer.vocab_size) if b"the" in tokenizer.id_to_bytes(t)}
    assert all(tokenizer.decode(s) == "the" for s in ids if len(s) > 1)
    usual = resolve(SamplingParams(dry_multiplier=1), tokenizer).dry_breaker_ids
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert newline in usual
    assert resolve(SamplingParams(dry_multiplier=1, dry_sequence_breakers=[]), tokenizer).dry_breaker_ids == []
    with pytest.raises(ParameterError, match="dry_sequence_breakers must not be empty"):
        SamplingParams(dry_sequence_breakers=[""])
    assert resolve(SamplingParams(), tokenizer).dry_breaker_ids == []


def test_long_and_broken_words_are_refused_by_name(tokenizer: Tokenizer) -> None:
    for name, word in (("bad_words", "x" * (MAX_WORD + 1)), ("dry_sequence_breakers", "\ud800")):
        params = SamplingParams(dry_multiplier=1, **{name: [word]})  # type: ignore[arg-type]
        with pytest.raises(ParameterError, match=f"^{name}") as caught:
            resolve(params, tokenizer)
        assert caught.value.param == name


def test_banned_words_do_not_come(llm: LLM, tokenizer: Tokenizer) -> None:
    """The first word of the answer is banned, then the one that came in its place, and so on."""
    words, banned = list[str](), set[int]()
    for _ in range(8):
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, bad_words=words)
        ids = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0].outputs[0].token_ids
        assert banned.isdisjoint(ids)
        token = next(
            t for t in ids if [t] in resolve(SamplingParams(bad_words=[text_of(t, tokenizer)]), tokenizer).bad_word_ids
        )
        words.append(text_of(token, tokenizer))
        banned.add(token)


def text_of(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token], continues=True).strip() or "x"


def test_allowed_tokens_and_dry_in_the_llm(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7]}

    def ids(**fields: object) -> list[int]:
        params = SamplingParams(max_tokens=60, ignore_eos=True, seed=1, **fields)  # type: ignore[arg-type]
        return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids

    few = ids(allowed_token_ids=[10, 11, 12])
    assert set(few) <= {10, 11, 12}

    def repeats(tokens: list[int]) -> int:
        triples = [tuple(tokens[i : i + 3]) for i in range(len(tokens) - 2)]
        return len(triples) - len(set(triples))

    dry = ids(allowed_token_ids=[10, 11, 12], dry_multiplier=50.0, dry_base=2.0, dry_sequence_breakers=[])
    assert repeats(few) > 30
    assert repeats(dry) < repeats(few) - 5
