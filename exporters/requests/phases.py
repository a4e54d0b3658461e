"""Phases of one request, which add up to its duration, and the cause of the longest one. Pure.

Invariant: the phases of a record sum to its e2e_ms exactly; measured parts that exceed the rest are cut to it. What
the engine did not report is part of the phase `engine`, never guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from exporters.requests.record import RequestRecord, ended_at

# Phase -> meaning, in the order in which they happen.
PHASES = {
    "gateway_queue": "waiting in the gateway",
    "attempts": "network, and attempts at other engines that failed",
    "network": "network and gateway, before the first token",
    "engine_queue": "waiting in the engine until first scheduled",
    "prefill": "first scheduled until the first token",
    "engine": "in the engine, which reports no queue and prefill time",
    "decode": "first until last token, without the waits for the client",
    "stall": "between tokens, beyond the TPOT of others",
    "delivery": "waiting for the client to read, and the end of the response",
}
STALL_FACTOR = 3.0  # a TPOT this many times the median of the others is no longer batching
STALL_NEIGHBOURS = 3  # a median of fewer requests says nothing


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a request. start_ms: after its arrival."""

    name: str
    start_ms: float
    length_ms: float

    @property
    def meaning(self) -> str:
        return PHASES[self.name]


def phases_of(record: RequestRecord, neighbours: Sequence[RequestRecord] = ()) -> list[Phase]:
    """Return the phases of a record that are longer than 0, in order; none without e2e_ms.

    neighbours: requests of the same engine and time, to tell a stall from slow decoding."""
    total = record.e2e_ms
    if total is None:
        return []
    lengths: dict[str, float] = {}
    left = total

    def cut(name: str, length: float | None) -> None:
        nonlocal left
        lengths[name] = min(max(0.0, length or 0.0), left)
        left -= lengths[name]

    cut("gateway_queue", record.queue_ms)
    client_wait = record.client_wait_ms or 0.0
    first_token = total - client_wait if record.ttft_ms is None else record.ttft_ms
    before_first = min(max(0.0, first_token - lengths["gateway_queue"]), left)
    after_first = left - before_first
    if record.engine_queue_ms is None and record.engine_ttft_ms is None:
        name = _unreported(record)
        lengths[name] = lengths.get(name, 0.0) + before_first
    else:
        left = before_first
        cut("engine_queue", record.engine_queue_ms)
        cut("prefill", record.engine_ttft_ms)
        # a response that is not streamed is decoded before its first byte is sent
        rest = "decode" if record.ttft_ms is None and record.outcome in ("ok", None) else _overhead(record)
        lengths[rest] = left
    left = after_first
    if record.ttft_ms is not None:
        cut("decode", _decode_ms(record, after_first))
        streamed = lengths["decode"]
        between_tokens = min(max(0.0, client_wait - left), streamed)
        left += between_tokens
        lengths["decode"] = decode = streamed - between_tokens
        usual, tpot = _usual_tpot_ms(neighbours), (record.tpot_ms or 0.0) * decode / (streamed or 1.0)
        if usual and tpot > STALL_FACTOR * usual:
            lengths["decode"] = decode * usual / tpot
            lengths["stall"] = decode - lengths["decode"]
    lengths["delivery"] = left
    found, at = [], 0.0
    for name in PHASES:
        if length := lengths.get(name, 0.0):
            found.append(Phase(name, at, length))
            at += length
    return found


def _unreported(record: RequestRecord) -> str:
    """Return the phase before the first token of a request whose engine reported nothing."""
    if record.outcome == "rejected":
        return "gateway_queue" if record.upstream is None else "engine"
    failed = record.tried is not None and record.ttft_ms is None and record.outcome not in ("ok", None)
    return "attempts" if failed else "engine"


def _overhead(record: RequestRecord) -> str:
    return "attempts" if record.tried else "network"


def _decode_ms(record: RequestRecord, after_first: float) -> float:
    if record.tpot_ms is None or record.completion_tokens is None:
        # a stream that broke off has no usage: it was being decoded, unless its client had stopped reading
        stopped = record.reason == "client_stalled" and record.client_wait_ms is None
        return 0.0 if record.completion_tokens == 1 or stopped else after_first
    return record.tpot_ms * max(0, record.completion_tokens - 1)


def _usual_tpot_ms(neighbours: Sequence[RequestRecord]) -> float | None:
    known = [one.tpot_ms for one in neighbours if one.tpot_ms is not None and not one.client_wait_ms]
    return median(known) if len(known) >= STALL_NEIGHBOURS else None


@dataclass(frozen=True, slots=True)
class Blame:
    """Share of a phase in the duration, and its cause."""

    phase: str
    share: float
    cause: str

    def __str__(self) -> str:
        return f"{self.share:.0%} {self.phase.replace('_', ' ')}" + (f": {self.cause}" if self.cause else "")


def blame(record: RequestRecord, neighbours: Sequence[RequestRecord] = ()) -> list[Blame]:
    """Return the phases by share, the longest first. neighbours: requests of the same engine that ran meanwhile."""
    found = phases_of(record, neighbours)
    total = sum(phase.length_ms for phase in found)
    if not total:
        return []
    causes = [
        Blame(phase.name, phase.length_ms / total, _CAUSES[phase.name](record, phase, neighbours)) for phase in found
    ]
    return sorted(causes, key=lambda one: -one.share)


def _others_in(
    name: str, record: RequestRecord, phase: Phase, neighbours: Sequence[RequestRecord]
) -> list[RequestRecord]:
    """Return the neighbours that were in one phase while the record was in another one."""
    if (span := span_of(record, phase)) is None:
        return []
    found = []
    for other in neighbours:
        for theirs in phases_of(other):
            if theirs.name == name and (at := span_of(other, theirs)) and at[0] < span[1] and span[0] < at[1]:
                found.append(other)
                break
    return found


def span_of(record: RequestRecord, phase: Phase | None = None) -> tuple[float, float] | None:
    """Return start and end of a request or of its phase, in unix seconds; None without a time."""
    ended_s = ended_at(record)
    if ended_s is None or record.e2e_ms is None:
        return None
    started_s = ended_s - record.e2e_ms / 1000
    if phase is None:
        return started_s, ended_s
    start_s = started_s + phase.start_ms / 1000
    return start_s, start_s + phase.length_ms / 1000


def _waiting(record: RequestRecord, phase: Phase, neighbours: Sequence[RequestRecord]) -> str:
    if record.outcome == "rejected":
        return f"rejected ({record.reason})" if record.reason else "rejected"
    others = len(_others_in(phase.name, record, phase, neighbours))
    running = len(_others_in("decode", record, phase, neighbours))
    return f"{_number(others, 'other')} {_were(others)} waiting, {running} running"


def _attempted(record: RequestRecord, _: Phase, __: Sequence[RequestRecord]) -> str:
    return (
        f"attempt {record.attempt or 1} succeeded after {record.tried}" if record.ttft_ms else f"tried {record.tried}"
    )


def _prefilled(record: RequestRecord, phase: Phase, neighbours: Sequence[RequestRecord]) -> str:
    others = len(_others_in("prefill", record, phase, neighbours))
    tokens = record.prompt_tokens
    if tokens is None:
        return f"{_number(others, 'other')} in prefill"
    return (
        f"{tokens:,} prompt tokens, {record.cached_tokens or 0:,} of them cached; {_number(others, 'other')} in prefill"
    )


def _decoded(record: RequestRecord, phase: Phase, neighbours: Sequence[RequestRecord]) -> str:
    others = len(_others_in("decode", record, phase, neighbours))
    tokens = "" if record.completion_tokens is None else f"{record.completion_tokens:,} tokens"
    pace = "" if record.tpot_ms is None else f" at {record.tpot_ms:g} ms"
    return f"{tokens}{pace}{'; ' if tokens else ''}{_number(others, 'other')} in decode"


def _stalled(record: RequestRecord, _: Phase, neighbours: Sequence[RequestRecord]) -> str:
    usual = _usual_tpot_ms(neighbours)
    if record.client_wait_ms is None:
        which = "preempted, or read slowly by the client; without client_wait_ms it is one or the other"
    elif record.client_wait_ms:
        which = f"preempted, or the engine paused; {record.client_wait_ms:,.0f} ms of waits for the client are apart"
    else:
        which = "preempted, or the engine paused; the client read in time"
    return f"TPOT {record.tpot_ms or 0:g} ms, median of the others {usual or 0:g} ms: {which}"


def _delivered(record: RequestRecord, _: Phase, __: Sequence[RequestRecord]) -> str:
    return "the client stopped reading" if record.reason == "client_stalled" else "the client read slowly"


def _engine(record: RequestRecord, _: Phase, neighbours: Sequence[RequestRecord]) -> str:
    return f"{_number(len(neighbours), 'other')} on the engine; it reports no queue and prefill time"


def _none(_: RequestRecord, __: Phase, ___: Sequence[RequestRecord]) -> str:
    return ""


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


_CAUSES: dict[str, Callable[[RequestRecord, Phase, Sequence[RequestRecord]], str]] = {
    "gateway_queue": _waiting,
    "attempts": _attempted,
    "network": _none,
    "engine_queue": _waiting,
    "prefill": _prefilled,
    "engine": _engine,
    "decode": _decoded,
    "stall": _stalled,
    "delivery": _delivered,
}
