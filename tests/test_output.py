"""ChoiceOutput: joined deltas equal one push of everything, for every cut; stop strings against a slow definition."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo.engine.messages import Progress
from octavo.request import FinishReason, SamplingParams, TokenLogprobs
from octavo.text.detokenizer import Detokenizer
from octavo.text.output import ChoiceOutput, Delta
from octavo.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. The end.\n\nThe end again.",
    "Grüße 👩‍👩‍👧‍👦 aus Köln — 東京タワー, naïve café, 🎉🎉🎉 done",
    "for i in range(10):\n    print(i)\n```\nSTOP here STOSTOP there",
    "aaaaaaaaaaaaabaaaaaaaaaaaaaaaaaab aab aaab",
]


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> Tokenizer:
    return load_tokenizer(data / "tokenizers" / "smollm2" / "vocab-only.gguf")


def scored(ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(i, -0.5, 1, [], []) for i in ids]


def run(tokenizer: Tokenizer, params: SamplingParams, pieces: list[list[int]], finish: FinishReason) -> list[Delta]:
    output = ChoiceOutput(tokenizer, params)
    deltas = []
    index = 0
    for n, ids in enumerate(pieces):
        last = n == len(pieces) - 1
        deltas.append(output.push(Progress("r", 0, index, ids, scored(ids), 0, finish if last else None)))
        index += len(ids)
    assert output.finish_reason is not None
    assert output.num_tokens == sum(len(d.token_ids) for d in deltas)
    assert [d.finish_reason for d in deltas if d.finish_reason] == [output.finish_reason]
    return deltas


def joined(deltas: list[Delta]) -> tuple[str, list[int], list[int], FinishReason, int | str | None]:
    ended = next(d for d in deltas if d.finish_reason is not None)
    return (
        "".join(d.text for d in deltas),
        [i for d in deltas for i in d.token_ids],
        [s.token_id for d in deltas for s in d.logprobs],
        ended.finish_reason or FinishReason.ERROR,
        ended.stop_reason,
    )


def definition(tokenizer: Tokenizer, params: SamplingParams, ids: list[int]) -> tuple[str, int, str | None]:
    """(text, tokens kept, stop string) by looking at every prefix of the decoded text for a stop string at its end."""
    detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
    text = ""
    for count, token in enumerate(ids, 1):
        new = detokenizer.push([token]) + (detokenizer.finish() if count == len(ids) else "")
        for char in new:
            text += char
            ends = [s for s in params.stop if text.endswith(s)]
            if ends and count > params.min_tokens:
                stop = max(ends, key=len)
                return text if params.include_stop_str_in_output else text.removesuffix(stop), count, stop
    return text, len(ids), None


def cuts(rng: random.Random, ids: list[int]) -> list[list[int]]:
    borders = sorted(rng.sample(range(len(ids) + 1), rng.randint(0, min(6, len(ids)))))
    return [ids[a:b] for a, b in zip([0, *borders], [*borders, len(ids)], strict=True)]


@pytest.mark.parametrize("text", TEXTS)
def test_every_cut_gives_the_definition(tokenizer: Tokenizer, text: str) -> None:
    rng = random.Random(text)
    ids = tokenizer.encode(text)
    found = 0
    for _ in range(150):
        stops = []
        for _ in range(rng.randint(0, 3)):
            start = rng.randrange(len(text))
            stops.append(text[start : start + rng.randint(1, 6)] if rng.random() < 0.8 else "absent")
        params = SamplingParams(
            stop=stops,
            include_stop_str_in_output=rng.random() < 0.3,
            min_tokens=rng.choice([0, 0, 0, 5]),
            max_tokens=None,
        )
        want_text, want_tokens, want_stop = definition(tokenizer, params, ids)
        found += want_stop is not None
        got = joined(run(tokenizer, params, cuts(rng, ids), FinishReason.LENGTH))
        kept = ids[:want_tokens]
        want_finish = FinishReason.LENGTH if want_stop is None else FinishReason.STOP
        assert got == (want_text, kept, kept, want_finish, want_stop), stops
    assert found > 50


def test_never_a_partial_stop_string(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=["STOP"], max_tokens=None)
    ids = tokenizer.encode(TEXTS[2])
    deltas = run(tokenizer, params, [[i] for i in ids], FinishReason.LENGTH)
    sent = ""
    for delta in deltas:
        sent += delta.text
        assert TEXTS[2].startswith(sent)
        assert not sent.endswith(("S", "ST", "STO", "STOP")) or delta.finish_reason
    assert sent == TEXTS[2][: TEXTS[2].index("STOP")]


def test_stop_token_leaves_the_text_and_is_named(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello there world")
    for included in (False, True):
        params = SamplingParams(stop_token_ids=[ids[-1]], include_stop_str_in_output=included)
        text, tokens, _, finish, reason = joined(run(tokenizer, params, [ids[:1], ids[1:]], FinishReason.STOP))
        assert (text, tokens, finish, reason) == (
            "Hello there world" if included else "Hello there",
            ids,
            FinishReason.STOP,
            ids[-1],
        )


def test_end_of_sequence_leaves_the_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("Hello"), min(tokenizer.eos_ids)]
    for skip in (True, False):
        params = SamplingParams(skip_special_tokens=skip)
        assert joined(run(tokenizer, params, [ids], FinishReason.STOP)) == ("Hello", ids, ids, FinishReason.STOP, None)


def test_incomplete_character_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 🎉")
    for cut in range(1, len(ids) + 1):
        got = joined(run(tokenizer, SamplingParams(), [[i] for i in ids[:cut]], FinishReason.LENGTH))
        assert got[0] == tokenizer.decode(ids[:cut])


def test_a_continuation_keeps_the_space_between(data: Path) -> None:
    spm = load_tokenizer(data / "tokenizers" / "tiny-spm")
    prompt, ids = (spm.encode(text, add_special_tokens=False) for text in ("Hello", "world"))
    whole = spm.decode(prompt + ids)
    assert whole == "Hello world"

    def text(*follows: int) -> str:
        return ChoiceOutput(spm, SamplingParams(), follows).push(Progress("r", 0, 0, ids, [], 0)).text

    assert spm.decode(prompt) + text(*prompt) == whole
    assert spm.bos_id is not None
    assert text() == text(spm.bos_id) == "world"


def test_after_the_end_nothing_comes(tokenizer: Tokenizer) -> None:
    output = ChoiceOutput(tokenizer, SamplingParams(stop=["b"]))
    ids = tokenizer.encode("a b c")
    first = output.push(Progress("r", 0, 0, ids, [], 0))
    assert (first.text, first.finish_reason, first.stop_reason) == ("a ", FinishReason.STOP, "b")
    assert output.push(Progress("r", 0, len(ids), ids, [], 0, FinishReason.LENGTH)) == Delta("", [], [], None, None)


def test_an_error_is_passed_on(tokenizer: Tokenizer) -> None:
    output = ChoiceOutput(tokenizer, SamplingParams())
    delta = output.push(Progress("r", 0, 0, [], [], 0, FinishReason.ERROR, error="no finite logit"))
    assert (delta.finish_reason, delta.error) == (FinishReason.ERROR, "no finite logit")
