"""BeamSearch: the beams of one request, and which of them go on.

The rules are those of `generate(num_beams=W)` of the library transformers, W being best_of, or n without it:

* A step looks at all continuations of all beams, best total logprob first. Of equal ones the lower beam comes first,
  then the lower token.
* One that ends (an end token or stop token id, behind min_tokens) is a hypothesis if fewer than W are better, and
  nothing otherwise. The W best of the others are the next beams; at the length limit they are hypotheses too.
* Hypotheses compare by logprob / length ** length_penalty, where the length is that of the output, its end token
  included. The W best are kept, the earlier of equal ones.
* It ends with W hypotheses: at once (early_stopping true), when the worst of them is no worse than the best beam
  would be if it ended now (false), or could be at any length up to the limit ("never", where length_penalty > 0).

A beam is a plain Request that its scheduler runs like any other, but for what it draws: it rests from when its scores
are known until those of all beams are. So a beam may be preempted at any time, and is recomputed exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from octavo.request import FinishReason, Request, SamplingParams, TokenLogprobs


class Beam(NamedTuple):
    request: Request
    logprob: float  # of all output tokens together
    scores: list[TokenLogprobs]  # per output token, where logprobs were asked for


class Candidate(NamedTuple):
    """A continuation of a beam by one token. They sort best first."""

    minus_logprob: float
    beam: int
    rank: int  # of the token among all continuations of its beam, from 0; equal logprobs by token id
    token: int


class Hypothesis(NamedTuple):
    score: float
    logprob: float
    token_ids: list[int]
    scores: list[TokenLogprobs]
    reason: FinishReason


class Turn(NamedTuple):
    """What becomes of the beams that all have drawn. A beam that is not named goes on by its own."""

    dropped: list[Request]
    forks: list[tuple[Request, Request]]  # (parent, new request with the parent's tokens and one more)


class Answer(NamedTuple):
    """One choice of the client's, never run: its output and why it ended."""

    request: Request
    scores: list[TokenLogprobs]  # per output token, where logprobs were asked for
    logprob: float  # of all output tokens together


class BeamSearch:
    """One search. Knows neither cache nor queue."""

    def __init__(self, request: Request, max_model_len: int) -> None:
        """`request` is the client's; `first` is the one to run. `Bounds.check` has passed the width."""
        params = request.params
        self.request = request
        self.width = params.num_candidates
        self.num_preemptions = 0  # of all beams together, counted by the scheduler
        self.num_recomputed = 0  # tokens, likewise
        self._num_expanded = self.width + len(request.stop_ids)  # of a beam: it may go on W times beside all ends
        self._limit = max_model_len - len(request.prompt_ids)  # output tokens
        if params.max_tokens is not None:
            self._limit = min(self._limit, params.max_tokens)
        self._params = msgspec.structs.replace(
            params, n=1, best_of=None, use_beam_search=False, length_penalty=1.0, early_stopping=False,
            temperature=0.0, logprobs=max(self._num_expanded, params.logprobs or 0),
        )  # fmt: skip
        self._num_requests = 0
        self.first = self._make([], self._params)
        self._params = msgspec.structs.replace(self._params, prompt_logprobs=None)
        self._beams = [Beam(self.first, 0.0, [])]
        self._drawn: dict[int, TokenLogprobs] = {}  # by choice
        self._hypotheses: list[Hypothesis] = []  # best first
        self.done = False

    @property
    def beams(self) -> list[Request]:
        return [beam.request for beam in self._beams]

    def take(self, request: Request, scores: TokenLogprobs) -> None:
        """A beam has drawn, and rests. `scores` has the best tokens of its distribution."""
        self._drawn[request.choice] = scores

    @property
    def is_ready(self) -> bool:
        """Whether all beams have drawn: `turn` is due."""
        return len(self._drawn) == len(self._beams)

    def turn(self) -> Turn:
        """Choose the next beams; their requests have one token more. With `done` all beams are dropped."""
        length = len(self._beams[0].request.output_ids) + 1
        following: list[Candidate] = []
        rank = 0
        for candidate in self._candidates():
            if len(following) == self.width:
                break
            ends = candidate.token in self.request.stop_ids
            if ends and length <= self.request.params.min_tokens:
                continue
            if not ends:
                following.append(candidate)
            elif rank < self.width:
                self._conclude(candidate, length, FinishReason.STOP)
            rank += 1
        if length == self._limit:
            for candidate in following:
                self._conclude(candidate, length, FinishReason.LENGTH)
        self.done = length == self._limit or self._is_settled(-following[0].minus_logprob, length)
        turn = self._follow([] if self.done else following)
        self._drawn = {}
        return turn

    def answers(self, reason: FinishReason | None = None) -> list[Answer]:
        """The n best hypotheses, best first; with a `reason` n empty ones that ended for it."""
        answers = []
        for choice in range(self.request.params.n):
            request = _copy(self.request, choice, self.request.params)
            if choice == 0:
                request.prompt_logprobs = self.first.prompt_logprobs
            hypothesis = Hypothesis(0.0, 0.0, [], [], reason) if reason else self._hypotheses[choice]
            request.output_ids = hypothesis.token_ids
            request.finish_reason = hypothesis.reason
            answers.append(Answer(request, hypothesis.scores, hypothesis.logprob))
        return answers

    def _candidates(self) -> list[Candidate]:
        candidates = []
        for b, beam in enumerate(self._beams):
            drawn = self._drawn[beam.request.choice]
            best = zip(drawn.top_ids, drawn.top_logprobs, strict=True)
            for rank, (token, logprob) in enumerate(best):
                candidates.append(Candidate(-(beam.logprob + logprob), b, rank, token))
        candidates.sort()
        return candidates

    def _conclude(self, candidate: Candidate, length: int, reason: FinishReason) -> None:
        beam, logprob = self._beams[candidate.beam], -candidate.minus_logprob
        hypothesis = Hypothesis(
            logprob / length**self.request.params.length_penalty,
            logprob,
            [*beam.request.output_ids, candidate.token],
            self._scores(candidate),
            reason,
        )
        self._hypotheses.append(hypothesis)
        self._hypotheses.sort(key=lambda h: -h.score)
        del self._hypotheses[self.width :]

    def _is_settled(self, best_logprob: float, length: int) -> bool:
        """Whether nothing that the beams may become is waited for."""
        params = self.request.params
        if len(self._hypotheses) < self.width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._limit
        attainable: float = best_logprob / length**params.length_penalty
        return self._hypotheses[-1].score >= attainable

    def _follow(self, following: list[Candidate]) -> Turn:
        beams, forks = [], []
        continued: set[int] = set()
        for candidate in following:
            request = self._beams[candidate.beam].request
            if candidate.beam in continued:
                parent, request = request, self._make(request.output_ids, self._params)
                forks.append((parent, request))
            continued.add(candidate.beam)
            beams.append(Beam(request, -candidate.minus_logprob, self._scores(candidate)))
        dropped = [beam.request for b, beam in enumerate(self._beams) if b not in continued]
        for candidate, beam in zip(following, beams, strict=True):
            beam.request.output_ids.append(candidate.token)
        self._beams = beams
        return Turn(dropped, forks)

    def _scores(self, candidate: Candidate) -> list[TokenLogprobs]:
        """Of the tokens of a beam and the one that continues it."""
        beam, num_top = self._beams[candidate.beam], self.request.params.logprobs
        if num_top is None:
            return []
        drawn = self._drawn[beam.request.choice]
        logprob = drawn.top_logprobs[candidate.rank]
        best = drawn.top_ids[:num_top], drawn.top_logprobs[:num_top]
        return [*beam.scores, TokenLogprobs(candidate.token, logprob, candidate.rank + 1, *best)]

    def _make(self, output_ids: list[int], params: SamplingParams) -> Request:
        request = _copy(self.request, self._num_requests, params)
        request.output_ids = list(output_ids)
        self._num_requests += 1
        return request


def _copy(request: Request, choice: int, params: SamplingParams) -> Request:
    """The same request before it has run, as another choice."""
    return Request(
        request.id,
        choice,
        request.prompt_ids,
        params,
        request.seed,
        request.eos_ids,
        request.terms,
        request.arrival,
        request.adapter,
    )
