"""Checks of data from the gateway or its clients: queue, rejections, teams, streams, client disconnects."""

from __future__ import annotations

import math
from dataclasses import replace

from alerts import thresholds
from alerts.thresholds import Threshold
from exporters.catalogue.metric import Unit
from stack.doctor.checks.case import (
    FEW,
    LEAST_REQUESTS,
    ROOM,
    Case,
    CheckResult,
    Fact,
    check_result,
    p95_fact,
    running_and_waiting,
    ttft_p95,
)
from stack.doctor.checks.failures import REFUSED_FOR_LOAD
from stack.doctor.checks.queue import check_kv_full, check_preempted, check_queue, expected_wait
from stack.doctor.evidence import EngineSnapshot, GatewayEvidence, Spread

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
LATER_ADAPTER = Threshold(
    "later_adapter",
    2.0,
    Unit.NONE,
    "Adapters of one model share its steps and its queue, so their first tokens come at like times.",
    "Judgement; vLLM loads an adapter in a fraction of a second from a local disk.",
)
MOST_OF_IT = Threshold(
    "most_of_it",
    0.75,
    Unit.RATIO,
    "Who has three quarters of what is under way makes the queue that everybody stands in.",
    "Judgement.",
)


def check_gateway_rejections(case: Case) -> CheckResult | None:
    if case.clients is None:
        return None
    limit, few = case.at(thresholds.REFUSAL_RATIO), case.at(FEW)
    by_reason = {
        reason: case.clients.reasons[reason] for reason in REFUSED_FOR_LOAD if case.clients.reasons.get(reason)
    }
    refused, whole = sum(by_reason.values()), case.clients.requests
    if refused < few.value or refused / whole <= limit.value:
        return None
    facts_by_reason = [Fact(f"refused by {reason}", count, Unit.REQUESTS) for reason, count in by_reason.items()]
    team, most = max(case.clients.refused.items(), key=lambda item: item[1], default=("", 0.0))
    facts_by_reason += [Fact(f"refused of team {team}, more than of any other", most, Unit.REQUESTS)] * bool(team)
    name = (
        "rejections-by-team-limit"
        if max(by_reason, key=lambda reason: by_reason[reason]) == "team_limit"
        else "rejections-by-gateway"
    )
    found = check_result(
        name,
        whole,
        Fact("of the requests are refused by the gateway", refused / whole, Unit.RATIO, limit),
        *facts_by_reason,
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
    """Add the numbers of a lever that raises slots by a quarter."""
    limit = gate and (gate.slots_limit or gate.slots)
    return replace(found, old=limit.highest, new=math.ceil(1.25 * limit.highest)) if limit else found


def check_gateway_queue(case: Case) -> CheckResult | None:
    """Find requests that wait before the engine while the engine itself has room."""
    figures, gate = case.figures, case.gateway
    if not _engine_has_room(figures):
        return None
    queued = case.clients.queue if case.clients else None
    waiting = gate.waiting if gate else None
    limit, length = case.at(thresholds.QUEUE_TIME_P95), case.at(thresholds.QUEUE_LENGTH)
    late = queued is not None and queued.at(95) > limit.value
    long = waiting is not None and waiting.lowest > max(0.0, length.value)
    if not late and not long:
        return None
    facts = list[Fact]()
    if queued:
        facts.append(Fact("queue time p95 in the gateway", queued.at(95), Unit.SECONDS, limit))
    if waiting:
        facts.append(Fact("requests wait in the gateway, at least", waiting.lowest, Unit.REQUESTS, length))
    if gate and gate.slots:
        facts.append(Fact("slots", gate.slots.highest, Unit.REQUESTS))
    expected = expected_wait(case, waiting) if gate and not queued else ()
    serious = late or any(fact.over for fact in (*expected, *ttft_p95(case)))
    amount = queued.count if queued else figures.requests
    ran = running_and_waiting(figures)
    return _with_slots(check_result("gateway-queue", amount, *facts, *expected, *ran, serious=serious), gate)


def _engine_has_room(figures: EngineSnapshot) -> bool:
    """Return True if nearly nobody waits in the engine and its KV cache is not full."""
    if figures.waiting is None or figures.waiting.mean >= 1:
        return False
    return figures.kv is None or figures.kv.highest <= ROOM.value


def check_one_team(case: Case) -> CheckResult | None:
    """Find a team with most of the requests, where others wait: alone on an idle engine it disturbs nobody."""
    teams = case.gateway.teams if case.gateway and case.gateway.teams else case.clients.teams if case.clients else {}
    whole = sum(teams.values())
    refused = check_gateway_rejections(case)
    crowded = refused is not None and refused.name != "rejections-by-team-limit"  # which touches that team alone
    if len(teams) < 2 or not (
        crowded or any(check(case) for check in (check_queue, check_preempted, check_kv_full, check_gateway_queue))
    ):
        return None
    team, most = max(teams.items(), key=lambda item: item[1])
    share = Fact(f"of the requests are of team {team}", most / whole, Unit.RATIO, MOST_OF_IT)
    return check_result("one-team", case.clients.requests if case.clients else whole, share) if share.over else None


def check_adapter(case: Case) -> CheckResult | None:
    """Find the LoRA adapter whose first tokens are late while those of all other requests are not. Longer prompts
    explain that, too, so these must be alike."""
    groups = case.clients.adapters if case.clients else {}
    limit, found = case.at(thresholds.TTFT_P95), list[tuple[float, CheckResult]]()
    for name, own in groups.items():
        others = [group for other, group in groups.items() if other != name]
        rest = Spread.of(value for group in others for value in group.ttft.values)
        if name is None or rest is None or min(own.ttft.count, rest.count) < LEAST_REQUESTS:
            continue
        prompts = Spread.of(value for group in others if group.prompt_tokens for value in group.prompt_tokens.values)
        longer = bool(own.prompt_tokens and prompts and own.prompt_tokens.mean > 2 * prompts.mean)
        late = p95_fact(f"time to first token of adapter {name} p95", own.ttft, limit)
        times = Fact("times that of all other requests", own.ttft.at(95) / rest.at(95), Unit.NONE, LATER_ADAPTER)
        if late.over and times.over and rest.at(95) <= limit.value and not longer:
            other = Fact("time to first token of the others p95", rest.at(95), Unit.SECONDS)
            found.append((times.value, check_result("slow-adapter", own.ttft.count, late, times, other)))
    return max(found, key=lambda item: item[0])[1] if found else None


def check_disconnects(case: Case) -> CheckResult | None:
    """Find client disconnects, in the log, else in two histograms of the engine, as long as some are certain."""
    limit, few = case.at(thresholds.HANGUP_RATIO), case.at(FEW)
    if case.clients:
        left, whole = case.clients.outcomes.get("client_abort", 0.0), case.clients.requests
        share = Fact("of the clients leave", left / whole if whole else 0.0, Unit.RATIO, limit)
        sure = left
    elif case.figures.disconnects and case.figures.begun:
        (sure, left), whole = case.figures.disconnects, case.figures.begun
        share = Fact("of the requests that began neither ended nor run", left / whole, Unit.RATIO, limit)
    else:
        return None
    if left < few.value or sure < 1 or left / whole <= limit.value:
        return None
    return check_result("client-disconnects", whole, share, Fact("left, at least", sure, Unit.REQUESTS))


def check_streaming(case: Case) -> CheckResult | None:
    """Compare the time per token at clients with that in the engine: the mean of each request, at both."""
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
    return check_result(
        name,
        client.count,
        times,
        Fact("time per token at the client p95", client.at(95), Unit.SECONDS, slow),
        *late,
        over=times.over,
    )
