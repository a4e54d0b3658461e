"""What may be wrong: one check for each finding, over the figures of one model or one engine. Pure.

A latency is a finding when it is over its threshold (alerts/thresholds.py, or a deployment's own numbers); the shares
of queue, prefill and decode and what stands beside them say whose it is.

Confidence, 0 to 1, is sqrt(amount) x (0.5 + 0.5 x over). amount: requests that the finding rests on, of ENOUGH, at most
1. over: 1 - threshold / figure, so 0 at the threshold, a half at twice of it. Just over it on plenty of evidence is
0.5: it may be the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from alerts import thresholds
from alerts.engine import FROZEN_FOR, QUEUE_FOR
from alerts.thresholds import Threshold
from exporters.catalogue.metric import Unit
from exporters.text import parse_window
from stack.doctor.evidence import Clients, EngineSnapshot, GatewayEvidence, Gauge, Spread
from stack.doctor.prompt_work import (
    LONG_STEP,
    PROMPT_WORK,
    SMALL_STEP,
    many_steps_long,
    tokens_of_a_prompt_step,
    tokens_per_long_step,
    tokens_per_step,
)  # fmt: skip
from stack.gateway.reasons import REASONS

LEAST_REQUESTS = 10  # with fewer, one of them decides every figure
LEAST_LATE = 3  # beyond a limit; the p95 of a dozen requests is one of them, and after a start the first ones are slow
LEAST_SECONDS = 5.0
LEAST_LOOKS = 5  # at which somebody waits; of fewer, one that falls between two batches decides what runs then
# what runs while others wait, of the most: so much is all places taken, the latter where the cache is nearly empty
FULL, FULL_WITH_ROOM = 0.95, 0.75
# the prefill of 100,000 tokens at 10,000 a second takes ten, and nothing else may be made meanwhile
LEAST_STILL_S = 15.0
ENOUGH = thresholds.COMPARED_AT_LEAST.value
FEW = thresholds.ERRORS_AT_LEAST
# of those that began, so many more or fewer ended: the figures of both are then of nearly the same ones
SAME_REQUESTS = 0.1
MANY_AT_ONCE = 32.0  # of these drafts and weights share a step so often that reading them is not what it waits for
_PER = 300.0  # seconds in which the thresholds of counts are meant
_LATER = ("team_limit", "queue_full", "est_wait", "queue_ttl")  # of the gateway, for load
_ITS_OWN = tuple(
    name
    for name, reason in REASONS.items()
    if reason.outcome == "rejected" and name not in (*_LATER, "engine_busy", "draining")
)

# What no alert has a number for.
FAR_LONGER = Threshold(
    "far_longer",
    4.0,
    Unit.NONE,
    "Prompts four times as long as the median take four times as long or more to compute; twice is ordinary.",
    "Judgement; the seeds of head-of-line blocking are files of 20,000 tokens among prompts of some hundred.",
)
STRETCHED = Threshold(
    "stretched",
    5.0,
    Unit.NONE,
    "A p99 of five times the median is no ordinary spread between steps or prompts of like length.",
    "Judgement; in recorded pages of an engine that is well it is 1 to 3.",
)
LATE_LOOP = Threshold(
    "late_loop",
    0.01,
    Unit.SECONDS,
    "An event loop that wakes up 10 ms late adds that to every token that it sends on.",
    "runbooks/incident-flow.md; a gateway with a core of its own stays below 1 ms.",
)
SLOWER_STREAM = Threshold(
    "slower_stream",
    2.0,
    Unit.NONE,
    "Between engine and client a token takes a fraction of a millisecond; half of the pace is lost on the way.",
    "runbooks/incident-flow.md.",
)
ROOM = Threshold(
    "room",
    0.8,
    Unit.RATIO,
    "Above it more sequences bring preemptions instead of speed.",
    "runbooks/VLLMQueueTimeHigh.md",
)
MOST_OF_IT = Threshold(
    "most_of_it",
    0.75,
    Unit.RATIO,
    "Who has three quarters of what is under way makes the queue that everybody stands in.",
    "Judgement.",
)
NEARLY_EMPTY = Threshold(
    "nearly_empty",
    0.3,
    Unit.RATIO,
    "Where less than a third of the cache was ever in use, nobody waits for room in it.",
    "Judgement.",
)
LONG_PROMPT = Threshold(
    "long_prompt",
    256.0,
    Unit.TOKENS,
    "Of shorter prompts hardly a block is whole, so the cache could not hold what they share.",
    "16 blocks of 16 tokens, the block size of vLLM on GPUs.",
)

OUTSIDE = Threshold(
    "outside",
    0.5,
    Unit.RATIO,
    "Where queue and prefill are not half of the wait for a first token, most of it was before them.",
    "Judgement.",
)
MOSTLY_PREFILL = Threshold(
    "mostly_prefill",
    2 / 3,
    Unit.RATIO,
    "Where two thirds of a request's time go into its prompt, the prompt is too long, whatever is reused of it.",
    "Judgement.",
)
WORTH_IT = Threshold(
    "worth_it",
    0.1,
    Unit.RATIO,
    "What takes less than a tenth of a request's time is not worth a change while nobody waits for it.",
    "Judgement.",
)

State = Literal["idle", "thin", "busy"]


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure, and the threshold it was held against, if any. least: of a figure that should be as large as the limit,
    not as small.

    between: the bounds that it lies in, where no more is known."""

    what: str
    value: float
    unit: Unit = Unit.NONE
    limit: Threshold | None = None
    least: bool = False
    between: tuple[float, float] | None = None

    @property
    def over(self) -> float:
        """0 at the limit, towards 1 the further the figure is on the wrong side of it; 0 on the right one."""
        if self.limit is None:
            return 0.0
        larger, smaller = (self.limit.value, self.value) if self.least else (self.value, self.limit.value)
        return 1 - smaller / larger if larger > smaller else 0.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check came to. amount: how many requests it rests on. over: of the fact that decides. old, new: as in a
    finding."""

    name: str
    serious: bool
    amount: float
    over: float
    facts: tuple[Fact, ...]
    old: float | None = None
    new: float | None = None

    @property
    def confidence(self) -> float:
        return math.sqrt(min(1.0, self.amount / ENOUGH)) * (0.5 + 0.5 * min(1.0, self.over))


@dataclass(frozen=True, slots=True)
class Case:
    """What a check may look at. one: whether the figures are of one engine alone, so that what runs there tells its
    places."""

    figures: EngineSnapshot
    at: Callable[[Threshold], Threshold]
    clients: Clients | None = None
    gateway: GatewayEvidence | None = None
    one: bool = True

    def limit_of(self, threshold: Threshold) -> Threshold:
        """A count that is meant for five minutes, for a longer time."""
        limit = self.at(threshold)
        return replace(limit, value=limit.value * max(1.0, self.figures.seconds / _PER))


def state_of(figures: EngineSnapshot) -> State:
    if not figures.work:
        return "idle"
    return "thin" if figures.requests < LEAST_REQUESTS or figures.seconds < LEAST_SECONDS else "busy"


def found_in(case: Case, state: State) -> Iterator[CheckResult]:
    """Each check once; those of latencies only where there is enough to go by."""
    if state == "idle":
        return
    for check in (*OF_STATES, *(OF_LATENCIES if state == "busy" else ())):
        if found := check(case):
            yield found


def _found(name: str, amount: float, *facts: Fact, serious: bool = True, over: float | None = None) -> CheckResult:
    """over: else the most that any fact is over its limit."""
    return CheckResult(
        name, serious, amount, max((fact.over for fact in facts), default=0.0) if over is None else over, facts
    )


def sent_by(gate: GatewayEvidence | None) -> float:
    """Requests that the gateway has at these engines at every look, whatever their own pages say."""
    return gate.running.lowest if gate and gate.running and gate.only else 0.0


def seconds_still(case: Case) -> float | None:
    """Return the seconds, up to the end, in which requests ran or waited and no token was made; None where that is not
    known."""
    figures = case.figures
    if (
        figures.running is None
        or figures.waiting is None
        or figures.prompt_tokens is None
        or figures.generation_tokens is None
    ):
        return None
    if sent_by(case.gateway) > 0 and not figures.tokens:  # of which the engine's own page may not know
        return figures.seconds
    if figures.still_s is not None or figures.tokens or figures.running.lowest + figures.waiting.lowest <= 0:
        return figures.still_s
    return figures.seconds


def _frozen(case: Case) -> CheckResult | None:
    """Find an engine that has work and makes nothing of it, up to the end. Several requests are better evidence than
    one, which may be a long prefill."""
    figures, still_s = case.figures, seconds_still(case)
    if still_s is None or still_s < LEAST_STILL_S or figures.running is None or figures.waiting is None:
        return None
    sent = sent_by(case.gateway)
    held = max(1.0, figures.running.lowest + figures.waiting.lowest, sent)
    return _found(
        "frozen-engine",
        _certainty(held, still_s),
        Fact("requests that run or wait, at least", held, Unit.REQUESTS),
        *[Fact("requests that the gateway has there, at least", sent, Unit.REQUESTS)] * bool(sent),
        Fact("tokens made", 0.0, Unit.TOKENS),
        Fact("for the last", still_s, Unit.SECONDS),
        *[Fact("tokens before that", figures.tokens, Unit.TOKENS)] * bool(figures.tokens),
        over=1.0,
    )


def _certainty(requests: float, still_s: float) -> float:
    """Return the amount of evidence, of ENOUGH, in requests that stand still for so many seconds."""
    return min(1.0, requests * still_s / parse_window(FROZEN_FOR)) * ENOUGH


def _silent(case: Case) -> CheckResult | None:
    """Find an engine that answered its first look and then no other."""
    silent_s = case.figures.silent_s
    if silent_s is None or silent_s < LEAST_STILL_S:
        return None
    held = case.figures.running.highest if case.figures.running else 0.0
    facts = (
        Fact("the page does not answer for the last", silent_s, Unit.SECONDS),
        Fact("requests that ran before, at most", held, Unit.REQUESTS),
    )
    return _found("frozen-api-server", _certainty(max(1.0, held), silent_s), *facts, over=1.0)


def _errors(case: Case) -> CheckResult | None:
    """From who saw them: the clients' side where there is one, else the engine's own and its HTTP answers, refusals
    left out."""
    if case.clients:
        failed = sum(case.clients.outcomes.get(outcome, 0.0) for outcome in ("upstream_error", "timeout"))
        whole = case.clients.requests
    else:
        figures = case.figures
        answered = figures.http.get("5xx", 0.0) - sum(figures.rejections.values())
        failed = max(figures.finished.get("error", 0.0), answered)
        whole = max(sum(figures.finished.values()), sum(figures.http.values()))
    limit, few = case.at(thresholds.ERROR_RATIO), case.at(FEW)
    if not whole or failed < few.value or failed / whole <= limit.value:
        return None
    return _found(
        "errors",
        whole,
        Fact("of the requests fail", failed / whole, Unit.RATIO, limit),
        Fact("failed", failed, Unit.REQUESTS),
    )


def _wrong(case: Case) -> CheckResult | None:
    limit, few = case.at(thresholds.REFUSAL_RATIO), case.at(FEW)
    if case.clients and case.clients.reasons:
        wrong, whole = sum(case.clients.reasons.get(reason, 0.0) for reason in _ITS_OWN), case.clients.requests
    else:
        wrong, whole = case.figures.http.get("4xx", 0.0), sum(case.figures.http.values())
    if not whole or wrong < few.value or wrong / whole <= limit.value:
        return None
    facts = (
        Fact("of the requests are refused for what they say", wrong / whole, Unit.RATIO, limit),
        Fact("refused", wrong, Unit.REQUESTS),
    )
    return _found("wrong-requests", whole, *facts, serious=False)


def _rejections(case: Case) -> CheckResult | None:
    limit = case.limit_of(thresholds.ENGINE_REFUSALS)
    refused = sum(case.figures.rejections.values())
    if refused < limit.value:
        return None
    by_reason = [
        Fact(f"by {reason}", count, Unit.REQUESTS) for reason, count in sorted(case.figures.rejections.items()) if count
    ]
    return _found(
        "rejections",
        refused + case.figures.requests,
        Fact("refused by the engine", refused, Unit.REQUESTS, limit),
        *by_reason,
    )


def _gateway_rejections(case: Case) -> CheckResult | None:
    if case.clients is None:
        return None
    limit, few = case.at(thresholds.REFUSAL_RATIO), case.at(FEW)
    by_reason = {reason: case.clients.reasons[reason] for reason in _LATER if case.clients.reasons.get(reason)}
    refused, whole = sum(by_reason.values()), case.clients.requests
    if refused < few.value or refused / whole <= limit.value:
        return None
    told = [Fact(f"refused by {reason}", count, Unit.REQUESTS) for reason, count in by_reason.items()]
    team, most = max(case.clients.refused.items(), key=lambda item: item[1], default=("", 0.0))
    told += [Fact(f"refused of team {team}, more than of any other", most, Unit.REQUESTS)] * bool(team)
    name = (
        "rejections-by-team-limit"
        if max(by_reason, key=lambda reason: by_reason[reason]) == "team_limit"
        else "rejections-by-gateway"
    )
    found = _found(
        name, whole, Fact("of the requests are refused by the gateway", refused / whole, Unit.RATIO, limit), *told
    )
    if name == "rejections-by-team-limit":
        return found
    queues, gate = case.figures.waiting, case.gateway
    slots = gate and gate.slots and gate.slots_limit and (gate.slots.mean, gate.slots_limit.mean)
    facts = [Fact("waiting in the engine, mean", queues.mean)] if queues else []
    facts += [Fact("slots, mean", slots[0]), Fact("slots at most", slots[1])] if slots else []
    # the gateway does for the engine what it is there for
    held_back = bool(queues and queues.mean >= 1) or bool(slots and slots[0] < slots[1])
    found = replace(found, serious=not held_back, facts=(*found.facts, *facts))
    return found if held_back else _with_slots(found, gate)


def _with_slots(found: CheckResult, gate: GatewayEvidence | None) -> CheckResult:
    """With the numbers of a lever that raises slots a quarter."""
    limit = gate and (gate.slots_limit or gate.slots)
    return replace(found, old=limit.highest, new=math.ceil(1.25 * limit.highest)) if limit else found


def _deferred(case: Case) -> CheckResult | None:
    deferred = case.figures.deferred
    if deferred is None or deferred.lowest <= 0:
        return None
    held = Fact("held back at every scrape, at least", deferred.lowest, Unit.REQUESTS)
    return _found("deferred-requests", case.figures.requests + deferred.lowest, held, serious=False, over=0.5)


def _preempted(case: Case) -> CheckResult | None:
    """Blocks are taken from who runs. No latency is needed for this: long answers may preempt for minutes before one of
    them ends."""
    figures, rate = case.figures, case.at(thresholds.PREEMPTIONS)
    preempted = figures.preemptions or 0.0
    per_second = Fact("preemptions per second", preempted / figures.seconds, Unit.COUNT, rate)
    if not per_second.over or preempted < case.at(FEW).value or figures.seconds < LEAST_SECONDS:
        return None
    facts = (per_second, Fact("preemptions", preempted, Unit.COUNT), *_used(case), *_ran(figures))
    found = _found("kv-bound", max(figures.requests, preempted), *facts, over=per_second.over)
    return replace(found, new=_fewer(case))


def _fewer(case: Case) -> float | None:
    """A quarter less than what runs."""
    running = case.figures.running
    return max(1, math.floor(0.75 * running.highest)) if running and running.highest >= 1 and case.one else None


def _kv_full(case: Case) -> CheckResult | None:
    """All blocks are in use, and the queue is for want of them."""
    figures = case.figures
    waits = figures.waiting is not None and figures.waiting.lowest > 0
    if _preempted(case) or not waits or not queue_leads(case) or not any(fact.over for fact in _used(case)):
        return None
    return _found("kv-full", figures.requests, *_used(case), *waited(case), serious=_queue_matters(case))


def _used(case: Case) -> tuple[Fact, ...]:
    kv = case.figures.kv
    return (
        (Fact("of the KV cache in use at its fullest", kv.highest, Unit.RATIO, case.at(thresholds.KV_CACHE_USAGE)),)
        if kv
        else ()
    )


def queue_bound(case: Case) -> CheckResult | None:
    """A wait that is over its limit, or that makes the first token late; not for want of cache, which is another
    finding."""
    figures = case.figures
    crowded, waiting = figures.crowded, figures.waiting
    if crowded is None or waiting is None or _preempted(case) or _kv_full(case) or not queue_leads(case):
        return None
    facts = waited(case)
    if not any(fact.over for fact in facts):
        return None
    name = _whose_queue(case, crowded)
    ran = Fact("running while others wait, mean", crowded.mean)
    room = [Fact("of the KV cache in use at its fullest", figures.kv.highest, Unit.RATIO)] if figures.kv else []
    found = _found(
        name, max(figures.requests, waiting.lowest), *facts, *_ran(figures), ran, *room, serious=_queue_matters(case)
    )
    known = name == "queue-bound" and case.one
    return replace(found, old=crowded.highest, new=math.ceil(1.5 * crowded.highest)) if known else found


def _whose_queue(case: Case, crowded: Gauge) -> str:
    """Of the scheduler's places, when about as many run as ever while others wait; else of what the engine can do. Two
    looks may not tell it."""
    kv = case.figures.kv
    if _slow_steps(case) or (kv and kv.highest > ROOM.value):
        return "queue-at-capacity"
    full = FULL_WITH_ROOM if kv and kv.highest < NEARLY_EMPTY.value else FULL
    if crowded.mean >= full * crowded.highest > 0 and crowded.looks != 1:
        return "queue-bound"
    return "queue-unclear" if crowded.looks is not None and crowded.looks < LEAST_LOOKS else "queue-at-capacity"


def queue_leads(case: Case) -> bool:
    """Whether more time goes into waiting than into computing prompts. Before enough requests end to tell that, a queue
    that stands leads."""
    figures = case.figures
    if figures.queue is None or state_of(figures) == "thin":
        return bool(_standing(case))
    return figures.prefill is None or figures.queue.total > figures.prefill.total


def _standing(case: Case) -> tuple[Fact, ...]:
    """A queue over its limit at every look, while tokens are made."""
    figures, length = case.figures, case.at(thresholds.QUEUE_LENGTH)
    if (
        figures.waiting is None
        or figures.waiting.lowest <= length.value
        or not figures.tokens
        or figures.seconds < LEAST_SECONDS
    ):
        return ()
    return (Fact("requests wait at every scrape, at least", figures.waiting.lowest, Unit.REQUESTS, length),)


def _queue_matters(case: Case) -> bool:
    """Return whether an alert would say so: a wait over its limit, or a queue that stands for ten minutes and grows
    (VLLMQueueGrowing).

    A queue that only stands is how a busy engine works while all waits are within their limits."""
    figures, length = case.figures, case.at(thresholds.QUEUE_LENGTH).value
    grows = (
        figures.seconds >= parse_window(QUEUE_FOR) and figures.queue_rise is not None and figures.queue_rise >= length
    )
    standing = _standing(case)
    return any(fact.over for fact in waited(case) if fact not in standing) or (grows and bool(standing))


def _expected_wait(case: Case, queue: Gauge | None) -> tuple[Fact, ...]:
    """Return the wait by Little's law, for a queue whose waits nobody measured."""
    figures = case.figures
    if queue is None or figures.begun is None or figures.seconds < LEAST_SECONDS:
        return ()
    wait_s = queue.lowest * figures.seconds / max(figures.begun, 1.0)
    return (
        Fact(
            "expected wait (waiting / first tokens per second)",
            wait_s,
            Unit.SECONDS,
            case.at(thresholds.QUEUE_TIME_P95),
        ),
    )


def _slow_steps(case: Case) -> bool:
    return bool((gaps := case.figures.between_tokens) and gaps.at(95) > case.at(thresholds.INTER_TOKEN_P95).value)


def waited(case: Case) -> tuple[Fact, ...]:
    queue = case.figures.queue
    if queue is None or state_of(case.figures) == "thin":
        standing = _standing(case)
        return (*standing, *(_expected_wait(case, case.figures.waiting) if standing else ()))
    times = (
        _p95("queue time p95", queue, case.at(thresholds.QUEUE_TIME_P95)),
        Fact("queue time, mean", queue.mean, Unit.SECONDS),
    )
    return (*times, *_standing(case), *_late(case))


def _late(case: Case) -> tuple[Fact, ...]:
    first = case.figures.ttft
    return (_p95("time to first token p95", first, case.at(thresholds.TTFT_P95)),) if first else ()


def _p95(what: str, spread: Spread, limit: Threshold) -> Fact:
    """Held against its limit only where more than one or two are beyond that."""
    known = limit if round(spread.above(limit.value) * spread.count) >= LEAST_LATE else None
    return Fact(what, spread.at(95), Unit.SECONDS, known, between=spread.around(95))


def _ran(figures: EngineSnapshot) -> tuple[Fact, ...]:
    running, waiting = figures.running, figures.waiting
    facts = [Fact("running, at most", running.highest, Unit.REQUESTS)] if running else []
    return (*facts, *([Fact("waiting, at most", waiting.highest, Unit.REQUESTS)] if waiting else []))


def _prefill(case: Case) -> CheckResult | None:
    """First tokens are late and computing prompts is most of that: because nothing is reused, or because there is so
    much to compute."""
    figures = case.figures
    if figures.prefill is None or queue_leads(case) or _api_server(case):
        return None
    name = _why_prefill(case)
    share = [
        Fact("of a request's time is prefill", part, Unit.RATIO)
        for area, part in figures.shares.items()
        if area == "prefill"
    ]
    late = _late(case)
    facts = (*late, Fact("prefill, mean", figures.prefill.mean, Unit.SECONDS), *share, *_reused(case))
    if any(fact.over for fact in late):
        return _found(name, figures.requests, *facts, over=late[0].over)
    matters = figures.shares.get("prefill", 0.0) > WORTH_IT.value
    return (
        _found(name, figures.requests, *facts, serious=False, over=0.5) if name != "prefill-bound" and matters else None
    )


def _computed_anew(case: Case) -> CheckResult | None:
    """Find prompts that are computed in full where something other than their own prefill is late: a queue, or the gaps
    between tokens.

    vLLM counts the wait for a place in a step as queue time and the steps of others' prompts as decode time, so both
    lead where prompts are to blame. A cache that is off is an option and as serious as what it makes late; that prompts
    share nothing may be their nature and is a note."""
    figures, work = case.figures, tokens_per_step(case.figures)
    name = "cache-off" if figures.caching is False else "unique-prompts" if _nothing_reused(case) else ""
    if (
        not name
        or not _long_prompts(figures)
        or _pooling(figures)
        or work is None
        or work <= PROMPT_WORK.value
        or _prefill(case)
    ):
        return None
    held_up = [found for check in (_preempted, _kv_full, queue_bound) if (found := check(case))]
    if not held_up and not _slow_steps(case):
        return None
    gaps = (
        [_p95("time between tokens p95", figures.between_tokens, case.at(thresholds.INTER_TOKEN_P95))]
        if figures.between_tokens
        else []
    )
    late = (*(waited(case) if held_up else ()), *gaps)
    serious = name == "cache-off" and (_slow_steps(case) or any(found.serious for found in held_up))
    over = max(fact.over for fact in (*late, *(fact for found in held_up for fact in found.facts)))
    facts = (*late, Fact("computed prompt tokens per step, mean", work, Unit.TOKENS, PROMPT_WORK), *_reused(case))
    return _found(name, figures.requests, *facts, serious=serious, over=over)


def _small_steps(case: Case) -> CheckResult | None:
    """Find long prompts that are computed in many small steps."""
    figures, tokens = case.figures, tokens_of_a_prompt_step(case.figures)
    if not case.one or tokens is None or not 0 < tokens < SMALL_STEP.value or not many_steps_long(figures):
        return None
    late = (*_late(case), *(waited(case) if queue_leads(case) else ()))
    felt = any(fact.over for fact in late)
    small = Fact("prompt tokens per step, about", tokens, Unit.TOKENS, SMALL_STEP, least=True)
    return _found(
        "small-steps", figures.requests, *dict.fromkeys(late), small, *_reused(case), serious=felt, over=small.over
    )


def _reused(case: Case) -> tuple[Fact, ...]:
    """Return how long prompts are and how much of them comes from the prefix cache."""
    figures, reused = case.figures, case.at(thresholds.CACHE_HITS_BEFORE)
    prompts = [Fact("prompt, mean", figures.prompt_length.mean, Unit.TOKENS)] if figures.prompt_length else []
    hits = (
        []
        if figures.hit_ratio is None
        else [Fact("of the prompt tokens found in the cache", figures.hit_ratio, Unit.RATIO, reused, least=True)]
    )
    return (*prompts, *hits, *([Fact("prefix caching", 0.0, Unit.FLAG)] if figures.caching is False else []))


def _long_prompts(figures: EngineSnapshot) -> bool:
    return figures.prompt_length is not None and figures.prompt_length.mean >= LONG_PROMPT.value


def _api_server(case: Case) -> CheckResult | None:
    """First tokens are late and neither queue nor prefill is why. The two are told when a request ends, first tokens as
    they come: only where as many end as begin do they speak of the same requests. A core that computes or stands still
    takes in nothing new, so up to the longest gap between tokens that wait is its own."""
    figures, first = case.figures, case.figures.ttft
    queue, prefill, steps, begun, ended = (
        figures.queue,
        figures.prefill,
        figures.between_tokens,
        figures.begun,
        figures.ended,
    )
    if first is None or queue is None or prefill is None or steps is None or not begun or not ended:
        return None
    if figures.waiting is None or figures.waiting.highest > 0 or abs(begun - ended) > SAME_REQUESTS * begun:
        return None
    before_s = first.mean - queue.mean - prefill.mean
    outside = Fact(
        "of the time to first token is neither queue nor prefill", before_s / first.mean, Unit.RATIO, OUTSIDE
    )
    if not outside.over or before_s <= steps.most or not any(fact.over for fact in _late(case)):
        return None
    means = (
        Fact(f"{name}, mean", spread.mean, Unit.SECONDS)
        for name, spread in (("queue time", queue), ("prefill", prefill))
    )
    return _found("api-server-bound", figures.requests, *_late(case), outside, *means)


def _reuse(case: Case) -> CheckResult | None:
    """Beside prefill that is too much: that nothing of it is reused is true as well."""
    figures, first = case.figures, _prefill(case)
    if first is None or first.name != "prefill-bound" or figures.caching is False or not _nothing_reused(case):
        return None
    hits = Fact(
        "of the prompt tokens found in the cache",
        figures.hit_ratio or 0.0,
        Unit.RATIO,
        case.at(thresholds.CACHE_HITS_BEFORE),
        least=True,
    )
    return _found("unique-prompts", figures.requests, hits, serious=False, over=0.5)


def _why_prefill(case: Case) -> str:
    """Where computing prompts is most of a request's time it is too much, whatever is reused; where it is less, what is
    not reused comes first."""
    figures = case.figures
    long = _long_prompts(figures)
    if figures.caching is False and long and not _pooling(figures):
        return "cache-off"
    most = figures.shares.get("prefill", 0.0) > MOSTLY_PREFILL.value
    return "unique-prompts" if long and not most and _nothing_reused(case) else "prefill-bound"


def _nothing_reused(case: Case) -> bool:
    ratio = case.figures.hit_ratio
    return ratio is not None and ratio < case.at(thresholds.CACHE_HITS_BEFORE).value and not _pooling(case.figures)


def _pooling(figures: EngineSnapshot) -> bool:
    """Embeddings and scores: nothing is generated, prompts share nothing, and some of these models have no prefix cache
    at all."""
    return figures.generation_tokens == 0 and figures.requests > 0


def _head_of_line(case: Case) -> CheckResult | None:
    """A tail in what many meet, and a few prompts that explain it: their own prefill is as long as the tail, or a good
    part of that. A long prompt's own first token is late anyhow: more must be than are long."""
    figures = case.figures
    lengths = figures.prompt_length
    if lengths is None or lengths.at(99) < FAR_LONGER.value * max(lengths.at(50), 1.0):
        return None
    far = Fact("prompt length, p99 over median", lengths.at(99) / max(lengths.at(50), 1.0), Unit.NONE, FAR_LONGER)
    long = lengths.above(FAR_LONGER.value * lengths.at(50))
    for name, what, spread, threshold in (
        ("head-of-line-first", "time to first token", figures.ttft, thresholds.TTFT_P95),
        ("head-of-line", "time between tokens", figures.between_tokens, thresholds.INTER_TOKEN_P95),
    ):
        limit = case.at(threshold)
        if spread is None or spread.at(99) <= limit.value or spread.at(99) <= STRETCHED.value * spread.at_most(50):
            continue
        if figures.prefill and spread.at(99) > FAR_LONGER.value * figures.prefill.at_most(99):
            continue
        if spread is figures.ttft and spread.above(STRETCHED.value * spread.at_most(50)) <= 1.5 * long:
            continue
        tail = Fact(f"{what}, p99 over median", spread.at(99) / spread.at_most(50), Unit.NONE, STRETCHED)
        p99 = Fact(f"{what} p99", spread.at(99), Unit.SECONDS, limit)
        # one short pause in a hundred is not
        felt = spread.at(95) > limit.value or spread.at(99) > STRETCHED.value * limit.value
        return _found(
            name,
            figures.requests,
            tail,
            p99,
            far,
            Fact("of the prompts are that long", long, Unit.RATIO),
            serious=felt,
            over=tail.over,
        )
    return None


def _slow_answers(case: Case) -> Spread | None:
    """Return the pace of answers where it is over its limit and most of a request's time goes into it."""
    figures, pace = case.figures, pace_of(case.figures)
    if pace is None or pace.at(95) <= case.at(thresholds.INTER_TOKEN_P95).value:
        return None
    share = figures.shares.get("decode")
    return None if share is not None and share < max(figures.shares.values()) else pace


def _prompts_in_gaps(case: Case) -> Fact | None:
    """Return how many prompt tokens the steps over the limit compute, where those are what makes them long."""
    tokens = tokens_per_long_step(case.figures, case.at(thresholds.INTER_TOKEN_P95).value)
    fact = (
        Fact("computed prompt tokens per step over that limit, about", tokens, Unit.TOKENS, LONG_STEP)
        if tokens is not None
        else None
    )
    return fact if fact and fact.over else None


def _interference(case: Case) -> CheckResult | None:
    """Find gaps between tokens that are long because the steps between them compute prompts, unless those prompts are a
    finding already."""
    figures, prompts, first = case.figures, _prompts_in_gaps(case), _prefill(case)
    if figures.between_tokens is None or prompts is None or _slow_answers(case) is None:
        return None
    if _head_of_line(case) or _small_steps(case) or (first and first.serious):
        return None
    late = _p95("time between tokens p95", figures.between_tokens, case.at(thresholds.INTER_TOKEN_P95))
    median = Fact("the same, median", figures.between_tokens.at(50), Unit.SECONDS)
    return _found("prefill-interference", figures.requests, late, median, prompts, *_ran(figures), over=late.over)


def _decode(case: Case) -> CheckResult | None:
    figures, pace = case.figures, _slow_answers(case)
    limit, share = case.at(thresholds.INTER_TOKEN_P95), case.figures.shares.get("decode")
    if pace is None or _prompts_in_gaps(case):
        return None
    if pace.at(95) > STRETCHED.value * pace.at_most(50) and (_head_of_line(case) or _prefill(case)):
        return None  # steps are long when they hold prompts, and those are told already
    facts = (
        Fact("time per token p95" if figures.drafts else "time between tokens p95", pace.at(95), Unit.SECONDS, limit),
        Fact("the same, mean", pace.mean, Unit.SECONDS),
        *([] if share is None else [Fact("of a request's time is decode", share, Unit.RATIO)]),
        *_ran(figures),
    )
    many = figures.running is not None and figures.running.mean > MANY_AT_ONCE
    found = _found(
        "decode-at-batch" if many else "decode-drafted" if figures.drafts else "decode-bound", figures.requests, *facts
    )
    return replace(found, new=_fewer(case)) if many else found


def pace_of(figures: EngineSnapshot) -> Spread | None:
    """How fast tokens come. With drafts a gap is a step of several tokens, so that only the mean of each request tells;
    0.10 does not show that."""
    return figures.per_token if figures.drafts and figures.per_token else figures.between_tokens


def _drafts(case: Case) -> CheckResult | None:
    figures, limit = case.figures, case.at(thresholds.ACCEPTANCE)
    if figures.acceptance is None or figures.acceptance >= limit.value:
        return None
    facts = (
        Fact("of the drafted tokens accepted", figures.acceptance, Unit.RATIO, limit, least=True),
        Fact("drafted", figures.drafted or 0.0, Unit.TOKENS),
    )
    return _found("speculative-decoding", figures.requests, *facts, serious=False)


def _gateway_queue(case: Case) -> CheckResult | None:
    """The wait before the engine, where the engine itself has room."""
    figures, gate, clients = case.figures, case.gateway, case.clients
    limit = case.at(thresholds.QUEUE_TIME_P95)
    queued = clients.queue if clients else None
    waits = bool(gate and gate.waiting and gate.waiting.lowest > 0)
    room = (
        figures.waiting is not None
        and figures.waiting.mean < 1
        and not (figures.kv and figures.kv.highest > ROOM.value)
    )
    if not room or not (queued or waits):
        return None
    late = queued is not None and queued.at(95) > limit.value
    long = (
        waits
        and gate is not None
        and gate.waiting is not None
        and gate.waiting.lowest > case.at(thresholds.QUEUE_LENGTH).value
    )
    if not late and not long:
        return None
    facts = [Fact("queue time p95 in the gateway", queued.at(95), Unit.SECONDS, limit)] if queued else []
    if gate and gate.waiting:
        length = case.at(thresholds.QUEUE_LENGTH)
        facts += [Fact("requests wait in the gateway, at least", gate.waiting.lowest, Unit.REQUESTS, length)]
    if gate and gate.slots:
        facts += [Fact("slots", gate.slots.highest, Unit.REQUESTS)]
    expected = _expected_wait(case, gate.waiting) if gate and not queued else ()
    serious = late or any(fact.over for fact in (*expected, *_late(case)))
    found = _found(
        "gateway-queue",
        queued.count if queued else figures.requests,
        *facts,
        *expected,
        *_ran(figures),
        serious=serious,
    )
    return _with_slots(found, gate)


def _one_team(case: Case) -> CheckResult | None:
    """Only beside something that waits: a team alone on an idle engine takes nothing from anybody."""
    teams = case.gateway.teams if case.gateway and case.gateway.teams else case.clients.teams if case.clients else {}
    whole = sum(teams.values())
    refused = _gateway_rejections(case)
    crowded = refused is not None and refused.name != "rejections-by-team-limit"  # which touches that team alone
    if len(teams) < 2 or not (
        crowded or any(check(case) for check in (queue_bound, _preempted, _kv_full, _gateway_queue))
    ):
        return None
    team, most = max(teams.items(), key=lambda item: item[1])
    told = Fact(f"of the requests are of team {team}", most / whole, Unit.RATIO, MOST_OF_IT)
    return _found("one-team", case.clients.requests if case.clients else whole, told) if told.over else None


def _hangups(case: Case) -> CheckResult | None:
    """From the log; else from the two histograms of the engine, as long as some are sure."""
    limit, few = case.at(thresholds.HANGUP_RATIO), case.at(FEW)
    if case.clients:
        left, whole = case.clients.outcomes.get("client_abort", 0.0), case.clients.requests
        told = Fact("of the clients leave", left / whole if whole else 0.0, Unit.RATIO, limit)
        sure = left
    elif case.figures.hangups and case.figures.begun:
        (sure, left), whole = case.figures.hangups, case.figures.begun
        told = Fact("of the requests that began neither ended nor run", left / whole, Unit.RATIO, limit)
    else:
        return None
    if left < few.value or sure < 1 or left / whole <= limit.value:
        return None
    return _found("hang-ups", whole, told, Fact("left, at least", sure, Unit.REQUESTS))


def _streaming(case: Case) -> CheckResult | None:
    """Tokens as clients got them against tokens as the engine made them: the mean of each request, at both."""
    client = case.clients.tpot if case.clients else None
    engine = case.figures.per_token
    if client is None or engine is None:
        return None
    slow, limit = case.at(thresholds.INTER_TOKEN_P95), SLOWER_STREAM
    times = Fact(
        "times as long for a token at the client as in the engine, p95",
        client.at(95) / engine.at_most(95),
        Unit.NONE,
        limit,
    )
    if not times.over or client.at(95) <= slow.value:
        return None
    lag = case.gateway.lag if case.gateway else None
    late = [Fact("the gateway's event loop is late, p95", lag.at(95), Unit.SECONDS, LATE_LOOP)] if lag else []
    name = "slow-gateway" if any(fact.over for fact in late) else "slow-streaming"
    return _found(
        name,
        client.count,
        times,
        Fact("time per token at the client p95", client.at(95), Unit.SECONDS, slow),
        *late,
        over=times.over,
    )


Check = Callable[[Case], CheckResult | None]
OF_STATES: tuple[Check, ...] = (
    _silent, _frozen, _errors, _preempted, _rejections, _gateway_rejections, _wrong, _deferred, _kv_full, queue_bound,
    _computed_anew,
)  # fmt: skip
OF_LATENCIES: tuple[Check, ...] = (
    _head_of_line, _api_server, _small_steps, _prefill, _reuse, _gateway_queue, _interference, _decode, _drafts,
    _streaming, _hangups, _one_team,
)  # fmt: skip
