"""Traffic model: rates, prompt and output lengths, concurrency by Little's law. Little's law makes requests and
tokens of it.

Invariant: what nobody said stays None, and what is impossible is refused; no figure is made up."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean

from exporters.requests.record import RequestRecord, ended_at

P95_SIGMAS = NormalDist().inv_cdf(0.95)  # how far the 95th percentile of a normal distribution is from its mean
KEPT = 1000  # sizes that stand for a log of any length
_STEPS = 24  # quantiles that stand for a distribution of lengths
_MINUTE_S = 60.0


class BadTraffic(ValueError):
    """Traffic that cannot be, or that no figure follows from: one sentence that names the field."""


# ---- formulas


def request_s(ttft_s: float, output_tokens: float, tpot_s: float) -> float:
    """Return how long a request is in the engine. W = TTFT + n_out x TPOT, in seconds."""
    return ttft_s + output_tokens * tpot_s


def in_flight(rate_per_s: float, ttft_s: float, output_tokens: float, tpot_s: float) -> float:
    """Requests that are there at once, on the average. L = lambda x W.

    Source: Little, A Proof for the Queuing Formula L = lambda W (1961). Holds for any arrivals and lengths while
    nothing piles up."""
    return rate_per_s * request_s(ttft_s, output_tokens, tpot_s)


def resident_tokens(
    rate_per_s: float, prompt_tokens: float, ttft_s: float, output_tokens: float, tpot_s: float
) -> float:
    """Tokens that are in the KV cache at once, on the average: lambda x (n_in x W + n_out^2 x TPOT / 2).

    The prompt is there all the time, the reply grows evenly from nothing: Little's law for tokens. Where lengths
    differ, the mean over requests."""
    return rate_per_s * (prompt_tokens * request_s(ttft_s, output_tokens, tpot_s) + output_tokens**2 * tpot_s / 2)


def rate_of_users(users: float, think_s: float, time_s: float) -> float:
    """Requests a second of people who each read a reply for think_s and then ask again. lambda = N / (W + Z), the
    interactive response time law."""
    return users / (time_s + think_s)


# ---- values


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts, or of replies."""

    p50: float
    p95: float
    mean: float


@dataclass(frozen=True, slots=True)
class TrafficProfile:
    """sizes: prompt and reply tokens of requests that are equally likely. rate_per_s: new requests a second. ttft_s,
    tpot_s: measured means, or targets, which are then an upper bound. users: people at work at once; think_s: from a
    reply to their next request. cached_share: of prompt tokens found in the prefix cache, 0 to 1. source: where lengths
    and times are from."""

    sizes: tuple[tuple[int, int], ...]
    prompt_tokens: Lengths
    output_tokens: Lengths
    rate_per_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    users: float | None = None
    think_s: float = 0.0
    cached_share: float | None = None
    source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (
            ("rate_per_s", True),
            ("ttft_s", False),
            ("tpot_s", True),
            ("users", True),
            ("think_s", False),
        ):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and (value > 0 or (value == 0 and not least))):
                raise BadTraffic(f"{name}: {value:g} should be {'more than 0' if least else '0 or more'}")
        if self.cached_share is not None and not 0 <= self.cached_share <= 1:
            raise BadTraffic(f"cached_share: {self.cached_share:g} should be from 0 to 1")
        if self.rate_per_s is not None and self.users is not None:
            raise BadTraffic("users: the rate is given too, and one follows from the other; keep one of them")

    @property
    def time_s(self) -> float | None:
        """Return the mean time of a request in the engine; None where a time is not known."""
        return (
            None
            if self.ttft_s is None or self.tpot_s is None
            else request_s(self.ttft_s, self.output_tokens.mean, self.tpot_s)
        )

    @property
    def arrivals_per_s(self) -> float | None:
        """New requests a second, of a given rate or of users; None where neither or no time is known."""
        if self.users is None or self.time_s is None:
            return self.rate_per_s
        return rate_of_users(self.users, self.think_s, self.time_s)

    @property
    def in_flight(self) -> float | None:
        """Requests that are there at once, on the average."""
        return None if self.arrivals_per_s is None or self.time_s is None else self.arrivals_per_s * self.time_s

    @property
    def resident_tokens(self) -> float | None:
        """Tokens that are in the KV cache at once, on the average."""
        rate, ttft_s, tpot_s = self.arrivals_per_s, self.ttft_s, self.tpot_s
        if rate is None or ttft_s is None or tpot_s is None:
            return None
        return fmean(resident_tokens(rate, prompt, ttft_s, output, tpot_s) for prompt, output in self.sizes)

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the values without which requests in flight cannot be computed."""
        rate = () if self.rate_per_s or self.users else ("requests_per_second or concurrent_users",)
        return rate + tuple(
            name for name, value in (("ttft_p95", self.ttft_s), ("itl_p95", self.tpot_s)) if value is None
        )


# ---- from a shape


def of_shape(prompt_p50: float, prompt_p95: float, output_p50: float, output_p95: float) -> TrafficProfile:
    """Traffic of which only the lengths are known, by two percentiles each. Raises BadTraffic.

    Lengths are taken as log-normal, the usual form of text lengths, and prompts and replies as independent of each
    other."""
    prompts, outputs = _quantiles("prompt", prompt_p50, prompt_p95), _quantiles("output", output_p50, output_p95)
    notes = (
        (
            "lengths between and beyond p50 and p95 are taken as log-normal, prompts and replies as independent; a"
            " request log says better"
        ),
    )
    return TrafficProfile(
        tuple(itertools.product(prompts, outputs)),
        Lengths(prompt_p50, prompt_p95, fmean(prompts)),
        Lengths(output_p50, output_p95, fmean(outputs)),
        source="p50 and p95",
        notes=notes if (prompt_p50, output_p50) != (prompt_p95, output_p95) else (),
    )


def _quantiles(name: str, p50: float, p95: float) -> tuple[int, ...]:
    """Lengths that are equally likely: one for all where both percentiles are the same."""
    for percentile, value in (("p50", p50), ("p95", p95)):
        if not (math.isfinite(value) and value >= 1):
            raise BadTraffic(f"{percentile}_{name}_tokens: {value:g} should be 1 or more")
    if p95 < p50:
        raise BadTraffic(
            f"p95_{name}_tokens: {p95:g} is less than p50_{name}_tokens ({p50:g}), and no percentile is below a"
            " lower one"
        )
    if p95 == p50:
        return (round(p50),)
    of_log = NormalDist(math.log(p50), math.log(p95 / p50) / P95_SIGMAS)
    return tuple(max(1, round(math.exp(of_log.inv_cdf((step + 0.5) / _STEPS)))) for step in range(_STEPS))


def within(traffic: TrafficProfile, max_model_len: int) -> TrafficProfile:
    """Return the traffic for an engine that stops at max_model_len tokens. Raises BadTraffic where not even the 95th
    percentiles go into that."""
    for name, lengths in (("p95_prompt_tokens", traffic.prompt_tokens), ("p95_output_tokens", traffic.output_tokens)):
        if lengths.p95 >= max_model_len:
            raise BadTraffic(
                f"{name}: {lengths.p95:,.0f} does not go into max_model_len ({max_model_len:,}), which holds prompt and"
                " reply; raise it"
            )
    cut = tuple(
        (min(prompt, max_model_len - 1), min(output, max(1, max_model_len - prompt)))
        for prompt, output in traffic.sizes
    )
    share = sum(before != after for before, after in zip(traffic.sizes, cut, strict=True)) / len(cut)
    if not share:
        return traffic
    note = (
        f"{share:.1%} of the requests would be longer than max_model_len ({max_model_len:,}) and are reckoned as cut"
        " off there"
    )
    prompts, outputs = (
        replace(traffic.prompt_tokens, mean=fmean(p for p, _ in cut)),
        replace(traffic.output_tokens, mean=fmean(o for _, o in cut)),
    )
    return replace(traffic, sizes=cut, prompt_tokens=prompts, output_tokens=outputs, notes=(*traffic.notes, note))


# ---- from a request log


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """Values of one record. texts: the requests that the engine made of it. time_s: in the engine, where that is
    known."""

    prompt: int
    output: int
    texts: int
    ttft_s: float | None
    decode_s: float | None
    ended: float | None


def of_log(records: Iterable[RequestRecord], place: str, model: str | None = None) -> TrafficProfile:
    """Traffic as a request log shows it; model: only requests for this one. Raises BadTraffic where it shows none, or
    several models' as one.

    The rate is that of the busiest minute. Waiting in the gateway is no time in the engine and does not count."""
    served: list[ServedRequest] = []
    models: Counter[str | None] = Counter()
    others = cached = cacheable = 0
    for record in records:
        if model is not None and model not in (record.model, record.adapter):
            continue
        one = served_request(record)
        if one is None:
            others += 1
            continue
        models[record.model] += 1
        served.append(one)
        if record.cached_tokens is not None and record.prompt_tokens:
            cached, cacheable = cached + record.cached_tokens, cacheable + record.prompt_tokens
    if not served:
        raise BadTraffic(
            f"{place}: no request {f'for {model} ' if model else ''}that ended well and has prompt_tokens and"
            " completion_tokens"
        )
    if len(models) > 1:
        raise BadTraffic(
            f"{place}: it holds requests for {', '.join(sorted(map(str, models)))}; say which with --served-model-name"
        )
    return _of(served, others, cached / cacheable if cacheable else None, place)


def served_request(record: RequestRecord) -> ServedRequest | None:
    """Return the values of a record; None if it was refused, broke off or does not say how long it was, since it would
    count as a short one."""
    if record.outcome not in (None, "ok") or not record.prompt_tokens or not record.completion_tokens:
        return None
    prompts = record.prompts or 1
    texts = prompts * (record.n or 1)
    output = max(1, round(record.completion_tokens / texts))
    ttft_s = None if record.ttft_ms is None else max(0.0, record.ttft_ms - (record.queue_ms or 0.0)) / 1000
    decode_s = None if record.tpot_ms is None else record.tpot_ms / 1000 * output
    return ServedRequest(
        max(1, round(record.prompt_tokens / prompts)), output, texts, ttft_s, decode_s, ended_at(record)
    )


def _of(served: Sequence[ServedRequest], others: int, cached_share: float | None, place: str) -> TrafficProfile:
    sizes = _representative([((one.prompt, one.output), one.texts) for one in served])
    ttfts = [one.ttft_s for one in served if one.ttft_s is not None]
    decodes = [(one.decode_s, one.output) for one in served if one.decode_s is not None]
    rate, origin = _rate(served)
    notes = (
        [f"{others} further requests of the log did not end well or have no lengths, and count nowhere"]
        if others
        else []
    )
    if 0 < len(ttfts) < len(served):
        notes.append(
            f"times are those of the {len(ttfts)} streamed requests of {len(served)}; one without stream has no time to"
            " first token"
        )
    return TrafficProfile(
        sizes,
        _lengths((one.prompt, one.texts) for one in served),
        _lengths((one.output, one.texts) for one in served),
        rate,
        fmean(ttfts) if ttfts else None,
        (sum(d for d, _ in decodes) / sum(o for _, o in decodes) or None) if decodes else None,
        cached_share=cached_share,
        source=f"{len(served):,} requests of {place}{origin}",
        notes=tuple(notes),
    )


def _representative(weighted: Iterable[tuple[tuple[int, int], int]]) -> tuple[tuple[int, int], ...]:
    """At most so many sizes, equally likely, that stand for all: ordered by what they hold, every k-th."""
    ordered = sorted(weighted, key=lambda each: (sum(each[0]), each[0]))
    ends = list(itertools.accumulate(weight for _, weight in ordered))
    count = min(KEPT, ends[-1])
    return tuple(ordered[bisect_right(ends, (step + 0.5) * ends[-1] / count)][0] for step in range(count))


def _lengths(weighted: Iterable[tuple[int, int]]) -> Lengths:
    """Summarise all lengths, with their numbers of texts, by nearest rank: a percentile is a length that was there."""
    values, weights = zip(*sorted(weighted), strict=True)
    ends = list(itertools.accumulate(weights))
    p50, p95 = (values[bisect_left(ends, share * ends[-1])] for share in (0.5, 0.95))
    return Lengths(p50, p95, fmean(values, weights))


def _rate(served: Sequence[ServedRequest]) -> tuple[float | None, str]:
    """Requests a second in the busiest minute, and its source; None where the log has no times, or one moment
    only."""
    timed = [(one.ended, one.texts) for one in served if one.ended is not None]
    if not timed:
        return None, ", which has no times"
    first, last = min(timed)[0], max(timed)[0]
    span_s = last - first
    if span_s < _MINUTE_S:
        return (
            (sum(texts for _, texts in timed) / span_s, f" in {span_s:.0f} s")
            if span_s
            else (None, ", all of one moment")
        )
    minutes: Counter[int] = Counter()
    for ended, texts in timed:
        minutes[int((ended - first) // _MINUTE_S)] += texts
    mean = sum(minutes.values()) / span_s
    return (
        max(minutes.values()) / _MINUTE_S,
        f", the rate that of its busiest minute (mean {mean:.3g} a second over {span_s / _MINUTE_S:.0f} min)",
    )
