"""Verdict of a golden check from what it observed. Pure.

Exact evidence comes first: tokens, template, values that are no numbers. Differences of numbers come last, against
noise, and named by what the engine says of itself; what nothing explains is called numeric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from exporters.engine.golden_state import GoldenCause, GoldenVerdict
from stack.golden.baseline import Baseline, EngineIdentity, GreedyText
from stack.golden.client import GreedyTokens, PromptScore
from stack.golden.comparison import LogprobDifference, Run, TokenPlace, compare, is_beyond

# Mean difference in nats from which numbers are wrong whatever explains them. Measured on an H100 in bfloat16, three
# models of 135 M to 2 B weights: another attention kernel 0.045 to 0.062, another dtype 0.041 to 0.089, weights rounded
# to 8 bits 0.092 to 0.20, to 4 bits above 1.
LARGE_MEAN = 0.1
# By so many nats a greedy token must have been ahead before another one in its place is no tie.
CLEAR_GAP, GAP_PER_NOISE = 0.5, 10.0


@dataclass(frozen=True, slots=True)
class Observation:
    """Evidence of a check so far. tokenized: other tokens of a text, by prompt. rendered: other tokens of the
    conversation. not_finite: evidence of values that are no numbers."""

    engine: EngineIdentity
    tokenized: Mapping[str, Sequence[int]] = field(default_factory=dict)
    rendered: Sequence[int] | None = None
    not_finite: str | None = None
    runs: Sequence[Sequence[PromptScore]] = ()
    greedy: Sequence[GreedyTokens | None] = ()

    @property
    def vectors(self) -> list[Run]:
        return [[score.own for score in run] for run in self.runs]


@dataclass(frozen=True, slots=True)
class GoldenDecision:
    verdict: GoldenVerdict
    cause: GoldenCause
    sentence: str
    difference: LogprobDifference | None = None
    first: str | None = None


def decide(baseline: Baseline, seen: Observation) -> GoldenDecision:
    """Return the verdict of a complete observation, or of one that exact evidence cut short."""
    if seen.tokenized:
        return _wrong(GoldenCause.TOKENIZER, _tokenizer(baseline, seen.tokenized))
    if seen.rendered is not None and baseline.conversation_ids is not None:
        if not seen.rendered:
            return _wrong(GoldenCause.TEMPLATE, "the chat route renders nothing any more: no chat template")
        where = first_difference(baseline.conversation_ids, seen.rendered)
        return _wrong(
            GoldenCause.TEMPLATE,
            f"the chat route renders {len(seen.rendered)} tokens instead of {len(baseline.conversation_ids)}, other"
            f" ones from position {where} on, while texts become the recorded tokens: another chat template",
        )
    if seen.not_finite is not None:
        return _wrong(GoldenCause.NOT_FINITE, f"{seen.not_finite}; the engine computes no numbers")
    if is_repetition(baseline.greedy, seen.greedy):
        return _wrong(GoldenCause.REPETITION, "every greedy completion repeats one token, and none did when recorded")
    return _numbers(baseline, seen)


def equal_to_record(baseline: Baseline, run: Sequence[PromptScore]) -> bool:
    """Return whether a run has every bit of the one that was recorded without other requests."""
    return all(score.own == prompt.alone for score, prompt in zip(run, baseline.prompts, strict=True))


def _numbers(baseline: Baseline, seen: Observation) -> GoldenDecision:
    found = compare(baseline.noise, baseline.limits.least_sd, seen.vectors)
    other = next(_divergences(baseline, seen.greedy), None)
    equal = all(equal_to_record(baseline, run) for run in seen.runs)
    if equal or not is_beyond(found, baseline.limits):
        if other is not None:
            sentence = f"prompts are computed as recorded, and a greedy completion differs: {other}"
            return GoldenDecision(GoldenVerdict.WRONG, GoldenCause.DECODE, sentence, found, other)
        if equal:
            sentence = f"all {found.tokens} log-probabilities are equal to the last bit"
            return GoldenDecision(
                GoldenVerdict.SAME, GoldenCause.NONE, sentence, LogprobDifference(found.tokens, 0.0, 0.0, 0.0)
            )
        return GoldenDecision(GoldenVerdict.SAME, GoldenCause.NOISE, f"within noise: {sizes(found)}", found)
    place = found.worst if baseline.limits.least_sd else found.first
    first = other or (_named(baseline, place) if place else None)
    cause, why = _explained(baseline.engine, seen.engine, found)
    mild = cause is GoldenCause.RELEASE and found.mean_abs <= LARGE_MEAN
    verdict = GoldenVerdict.DIFFERENT if mild else GoldenVerdict.WRONG
    return GoldenDecision(verdict, cause, f"{why}: {sizes(found)}", found, first)


def _explained(recorded: EngineIdentity, now: EngineIdentity, found: LogprobDifference) -> tuple[GoldenCause, str]:
    """Return the cause of different numbers as far as evidence goes."""
    for name, word in (("dtype", "dtype"), ("quantization", "quantization")):
        was, value = getattr(recorded, name), getattr(now, name)
        if was != value and (name == "quantization" or None not in (was, value)) and recorded.dtype and now.dtype:
            return GoldenCause.DTYPE, f"{word} {value or 'none'} instead of {was or 'none'}"
    if _other_grid(recorded.logit_bits, now.logit_bits):
        return (
            GoldenCause.DTYPE,
            f"logits lie on {_grid(now.logit_bits)} instead of {_grid(recorded.logit_bits)}: another dtype",
        )
    if (recorded.root, recorded.max_model_len) != (now.root, now.max_model_len) and found.mean_abs > LARGE_MEAN:
        return GoldenCause.MODEL, f"{now.root} ({now.max_model_len} tokens) answers to the name of {recorded.root}"
    if recorded.version != now.version:
        what = (
            "numbers as of another model" if found.mean_abs > LARGE_MEAN else "record a new baseline if this is meant"
        )
        return (
            GoldenCause.RELEASE,
            f"release {now.version or 'unknown'} instead of {recorded.version or 'unknown'} ({what})",
        )
    return GoldenCause.NUMERIC, "numeric damage, or other weights, kernels or hardware than recorded"


def _other_grid(was: int | None, now: int | None) -> bool:
    """Return whether two grids of logits are those of different dtypes: float16 is three bits finer than bfloat16."""
    if was is None or now is None:
        return was is not now
    return abs(was - now) > 1


def _grid(bits: int | None) -> str:
    return "no grid" if bits is None else f"a grid of 2^-{bits}"


def sizes(found: LogprobDifference) -> str:
    """Return a difference in words."""
    text = (
        f"mean {found.mean_abs:.2g}, p99 {found.p99:.2g}, largest {found.max_abs:.2g} nats over {found.tokens} tokens"
    )
    if found.z2 is not None and found.max_z is not None:
        text += f"; against noise Z2 {found.z2:.3g}, largest z {found.max_z:.3g}"
    return text


def first_difference(was: Sequence[object], now: Sequence[object]) -> int:
    """Return the first position at which two sequences differ."""
    pairs = zip(was, now, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(was), len(now)))


def _tokenizer(baseline: Baseline, tokenized: Mapping[str, Sequence[int]]) -> str:
    name, ids = next(iter(tokenized.items()))
    was = next(prompt.text_ids for prompt in baseline.prompts if prompt.name == name)
    what = (
        "without the first token"
        if tuple(ids) == was[1:]
        else "with another first token in front"
        if tuple(ids[1:]) == was
        else f"{len(ids)} tokens instead of {len(was)}, other ones from position {first_difference(was, ids)} on"
    )
    return f"{len(tokenized)} of {len(baseline.prompts)} texts become other tokens; {name}: {what}"


def is_repetition(recorded: Sequence[GreedyText], now: Sequence[GreedyTokens | None]) -> bool:
    """Return whether all completions repeat one token and none did before."""
    texts = [one.tokens for one in now if one is not None]
    return (
        bool(texts)
        and all(len(set(text)) == 1 < len(text) for text in texts)
        and all(len(set(one.tokens)) > 1 for one in recorded)
    )


def _divergences(baseline: Baseline, now: Sequence[GreedyTokens | None]) -> Iterator[str]:
    """Yield greedy completions with another token where the recorded one was clearly ahead."""
    exact = not baseline.limits.least_sd and not baseline.greedy_varies
    clear = 0.0 if exact else max(CLEAR_GAP, GAP_PER_NOISE * baseline.limits.max_abs)
    for was, text in zip(baseline.greedy, now, strict=False):
        if text is None or text.tokens == was.tokens:
            continue
        place = first_difference(was.tokens, text.tokens)
        gap = was.gaps[place] if place < len(was.gaps) else clear
        if exact or gap >= clear:
            yield f"{was.prompt}, completion token {place}"


def _named(baseline: Baseline, place: TokenPlace) -> str:
    return f"{baseline.prompts[place.prompt].name}, prompt token {place.position}"


def _wrong(cause: GoldenCause, sentence: str) -> GoldenDecision:
    return GoldenDecision(GoldenVerdict.WRONG, cause, sentence)
