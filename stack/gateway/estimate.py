"""Token estimates before the engine has counted: prompt from bytes, output from earlier requests.

Invariants: an estimate orders and protects; records carry the engine's own counts. The one estimate that reaches a bill
is that of a stream whose usage never came, in a field of its own. Only answers of an engine teach anything, and what is
kept is bounded, since names come from clients. What one team's prompts teach counts for that team; a team without
answers of its own starts from the mean over teams, in which each has one vote. No request is refused for good by what
was learned, only by `certain`. Pure: no clock, no randomness."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from stack.gateway.request_body import TokenRequest

# A cold start: English text has about 4 bytes per token in the vocabularies of today. A guess until some ten answers
# have corrected it.
BYTES_PER_TOKEN = 4.0
# Text outside of this is not text: below are raw bytes, above are repetitions. English has 4 to 5 bytes per token,
# program code 3 to 4, and Chinese written as \uXXXX, with 6 bytes a character and up to 2 characters a token, stays
# below 12. So a prompt of text has
# more than bytes / 12 tokens.
LEAST_BYTES, MOST_BYTES = 1.0, 12.0
# Weight of one answer: after 22 of them a tenth of what was known before is left.
WEIGHT = 0.1
# Shorter prompts teach nothing: most of their tokens are the chat template's.
SHORT_BYTES = 500
# Tokens of one image, sound or file; a guess, for it depends on model and resolution: 256 (Gemma 3), 576 (LLaVA 1.5),
# 1369 (Qwen2-VL, 1024 x 1024 pixels), 1601 (Llama 3.2 Vision, per tile). Source: the models' configurations. Prompts
# with such parts teach nothing
# about text.
MEDIA_TOKENS = 1024
# A cold start: the output that a team is expected to want until about 18 answers say something else.
OUTPUT_TOKENS = 1024
# Share of a team's answers that the expected output covers, and how much of an answer's weight is left after the next
# one.
COVERED, KEPT = 0.9, 0.99
MOST_WEIGHT = 1e100  # of one answer beside those of before; then all are scaled down
# An event holds one token or more: speculative decoding and --stream-interval put several into one. Beyond MOST_TOKENS
# nothing is learned, because hidden reasoning and buffered tool calls are tokens without events.
LEAST_TOKENS, MOST_TOKENS = 1.0, 64.0
PRIOR_EVENTS = 400.0, 400.0  # a cold start: so many events of one token each
WINDOW_EVENTS = 4000.0  # that many later events make an earlier one count for nothing
MOST_NAMES = 256  # models, and teams; the one heard of longest ago is forgotten
MOST_PAIRS = 1024  # teams times models whose prompts are known; likewise
LONGEST_NAME = 256
# After the engine has counted more for a prompt than its team may send, the estimate decides for so long instead of the
# certain bound.
OVERRUN_S = 60.0

_Value = TypeVar("_Value")
_Pair = tuple[str | None, str | None]  # team and model


class Outputs:
    """Lengths of answers: a histogram over powers of two in which older answers fade, so the quantile is at most twice
    too large.

    It begins with two answers of OUTPUT_TOKENS."""

    __slots__ = ("_counts", "_highest", "_weight")

    def __init__(self) -> None:
        self._counts = [0.0] * 32  # of answers of up to 2**index tokens
        self._highest = _power(OUTPUT_TOKENS)  # with any answer
        self._counts[self._highest] = 2.0
        self._weight = 1.0  # of the next answer: it grows, where all earlier ones would have to fade

    def add(self, tokens: int) -> None:
        self._weight /= KEPT
        self._counts[power := _power(tokens)] += self._weight
        self._highest = max(self._highest, power)
        if self._weight > MOST_WEIGHT:
            self._counts = [count / self._weight for count in self._counts]
            self._weight = 1.0

    def covering(self, share: float) -> int:
        """So many tokens that this share of answers was no longer."""
        beyond = (1 - share) * sum(self._counts)
        for power in range(self._highest, -1, -1):
            beyond -= self._counts[power]
            if beyond < 0:
                return 1 << power
        return 1  # for a share of 0


def _power(tokens: int) -> int:
    """The smallest power of two that is no less, as exponent."""
    return min(31, max(0, tokens - 1).bit_length())


class Estimator:
    """Learns from the usage of answers; knows a guess before it has any."""

    def __init__(self) -> None:
        self._tokens_per_byte: dict[_Pair, float] = {}
        # model -> sum over teams of tokens per byte, and their number
        self._votes: dict[str | None, tuple[float, int]] = {}
        self._overruns: dict[_Pair, float] = {}  # -> when the latest one was counted
        self._outputs: dict[str | None, Outputs] = {}
        self._events: dict[_Pair, tuple[float, float]] = {}  # fading sums of content events and of the tokens in them

    def bytes_per_token(self, model: str | None, team: str | None = None) -> float:
        return 1 / self._known(model, team)

    def prompt(self, model: str | None, ask: TokenRequest, team: str | None = None) -> int:
        """Tokens of the prompt, of all prompts together. Exact for token ids."""
        return ask.prompt_ids + ask.media * MEDIA_TOKENS + math.ceil(self._known(model, team) * ask.prompt_bytes)

    def text(self, model: str | None, team: str | None, size: int) -> int | None:
        """Tokens of generated text of so many bytes; None for none."""
        return math.ceil(self._known(model, team) * size) or None

    def certain(self, ask: TokenRequest) -> int:
        """Return the tokens that all prompts of a request have at least, whatever was learned. Media count nothing
        here."""
        return ask.prompt_ids + int(ask.prompt_bytes / MOST_BYTES)

    def at_least(self, prompt: int, ask: TokenRequest) -> int:
        """Tokens that the longest prompt of an ask has for sure, whose estimate is `prompt`; 0 where the engine would
        cut it to what fits."""
        certain = ask.prompt_ids + int(max(0, ask.prompt_bytes - ask.maybe_bytes) / MOST_BYTES)
        return 0 if ask.truncates else min(prompt, certain) // max(1, ask.prompts)

    def learn(self, model: str | None, ask: TokenRequest, prompt_tokens: int, team: str | None = None) -> None:
        """Takes in what the engine counted for the prompt."""
        if (
            ask.media
            or ask.prompt_ids
            or ask.prompt_bytes < SHORT_BYTES
            or prompt_tokens < 1
            or len(model or "") > LONGEST_NAME
        ):
            return
        seen = min(1 / LEAST_BYTES, max(1 / MOST_BYTES, prompt_tokens / ask.prompt_bytes))
        known, former = self._known(model, team), self._tokens_per_byte.pop((team, model), None)
        self._tokens_per_byte[team, model] = value = known + WEIGHT * (seen - known)
        self._vote(model, value - (former or 0.0), 1 if former is None else 0)
        if len(self._tokens_per_byte) > MOST_PAIRS:
            oldest = next(iter(self._tokens_per_byte))
            self._vote(oldest[1], -self._tokens_per_byte.pop(oldest), -1)

    def _known(self, model: str | None, team: str | None) -> float:
        """Return the tokens per byte of a team's prompts, or else the mean over teams, in which the cold start has a
        vote as well."""
        if (own := self._tokens_per_byte.get((team, model))) is not None:
            return own
        total, teams = self._votes.get(model, (0.0, 0))
        return (1 / BYTES_PER_TOKEN + total) / (1 + teams)

    def _vote(self, model: str | None, value: float, teams: int) -> None:
        total, known = self._votes.get(model, (0.0, 0))
        self._votes[model] = total + value, known + teams
        if known + teams == 0:
            del self._votes[model]

    def note_overrun(self, model: str | None, team: str | None, now: float) -> None:
        """Remember that the engine counted more for a prompt of a team than the team may send."""
        if len(model or "") <= LONGEST_NAME:
            self._overruns.pop((team, model), None)
            self._overruns[team, model] = now
            if len(self._overruns) > MOST_PAIRS:
                del self._overruns[next(iter(self._overruns))]

    def strict_s(self, model: str | None, team: str | None, now: float) -> float:
        """Return for how many seconds more the estimate decides on a team's limit; 0 while the team has given no
        reason."""
        return max(0.0, self._overruns.get((team, model), -math.inf) + OVERRUN_S - now)

    def output(self, team: str | None, ask: TokenRequest) -> int:
        """Tokens of all texts together: for each the 90th percentile of what the team got before, or what was asked for
        where that is less."""
        outputs = self._outputs.get(team) or Outputs()
        each = outputs.covering(COVERED)
        return ask.outputs * (each if ask.max_tokens is None else min(each, ask.max_tokens))

    def learn_output(self, team: str | None, ask: TokenRequest, completion_tokens: int) -> None:
        """Takes in how long the texts of an answer were in all."""
        if ask.outputs and completion_tokens >= 0 and len(team or "") <= LONGEST_NAME:
            _used(self._outputs, team, Outputs).add(completion_tokens // ask.outputs)

    def completion(self, team: str | None, model: str | None, shown: int, text_bytes: int) -> int | None:
        """Return the tokens of a stream whose events have shown so many, at least as many; None for none.

        By what the team's own finished streams of the model had, so that no team changes what another is charged. Text
        of more than MOST_BYTES for each of them came several tokens at once, and is estimated by its size."""
        seen, tokens = self._events.get((team, model), PRIOR_EVENTS)
        by_events = math.ceil(shown * min(MOST_TOKENS, max(LEAST_TOKENS, tokens / seen)))
        by_text = self.text(model, team, text_bytes) if text_bytes > MOST_BYTES * by_events else None
        return max(by_events, by_text or 0) or None

    def generated_bytes(self, ask: TokenRequest, text_bytes: int) -> int:
        """Return the bytes of text that was generated: `echo` repeats the prompt before each text."""
        prompt = int(ask.prompt_bytes + MOST_BYTES * ask.prompt_ids) if ask.echoes else 0
        return max(0, text_bytes - prompt * ask.outputs // max(1, ask.prompts))

    def learn_events(self, team: str | None, model: str | None, events: int, completion_tokens: int) -> None:
        """Learn tokens per token that events show from a stream whose usage arrived.

        As a ratio of sums: a stream of a few events says little, since its end-of-sequence token makes none."""
        if events < 1 or len(team or "") + len(model or "") > 2 * LONGEST_NAME:
            return
        seen, tokens = self._events.pop((team, model), PRIOR_EVENTS)
        kept = max(0.0, 1 - events / WINDOW_EVENTS)
        self._events[team, model] = events + kept * seen, min(completion_tokens, MOST_TOKENS * events) + kept * tokens
        if len(self._events) > MOST_PAIRS:
            del self._events[next(iter(self._events))]


def _used(known: dict[str | None, _Value], name: str | None, new: Callable[[], _Value]) -> _Value:
    """Return the entry of this name, or a new one; it becomes the youngest, and beyond MOST_NAMES the oldest goes."""
    value = known.pop(name) if name in known else new()
    known[name] = value
    if len(known) > MOST_NAMES:
        del known[next(iter(known))]
    return value
