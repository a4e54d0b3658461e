"""Phases of a request, and the situations in which each is the longest."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.requests.phases import blame, phases_of
from exporters.requests.record import RequestRecord, timestamp

END_S = 1_764_000_000.0


def request(name: str = "r", ended_s: float = 0.0, **fields: object) -> RequestRecord:
    """Return a streamed request of 100 tokens that took 2.2 s on an idle engine."""
    usual: dict[str, object] = {
        "upstream": "e1", "model": "m", "team": "chat", "outcome": "ok", "stream": True, "attempt": 1,
        "prompt_tokens": 500, "cached_tokens": 0, "completion_tokens": 101,
        "queue_ms": 0.5, "engine_queue_ms": 0.3, "engine_ttft_ms": 90.0, "ttft_ms": 100.0, "tpot_ms": 20.0,
        "e2e_ms": 2110.0,
    }  # fmt: skip
    return RequestRecord(request_id=name, ts=timestamp(END_S + ended_s), **{**usual, **fields})  # type: ignore[arg-type]


BUSY = [request(f"n{number}", ended_s=number / 50) for number in range(23)]
WAITING = [
    request(f"w{number}", number / 50, queue_ms=0.5, engine_queue_ms=8000.0, ttft_ms=8100.0, e2e_ms=10_000.0)
    for number in range(23)
]
# situation -> record, the others of its engine, phase that must be the longest, words of its cause
SITUATIONS = {
    "queue of the engine": (
        request(engine_queue_ms=7800.0, ttft_ms=7900.0, e2e_ms=9910.0), WAITING, "engine_queue",
        "23 others were waiting",
    ),
    "queue of the gateway": (
        request(queue_ms=6000.0, ttft_ms=6100.0, e2e_ms=8110.0), BUSY, "gateway_queue", "others were waiting",
    ),
    "long prompt": (
        request(prompt_tokens=120_000, engine_ttft_ms=9000.0, ttft_ms=9010.0, e2e_ms=11_020.0), BUSY, "prefill",
        "120,000 prompt tokens, 0 of them cached",
    ),
    "long answer": (
        request(completion_tokens=2001, e2e_ms=40_110.0), BUSY, "decode", "2,001 tokens at 20 ms",
    ),
    "preemption": (
        request(tpot_ms=150.0, e2e_ms=15_110.0, client_wait_ms=0.0), BUSY, "stall",
        "median of the others 20 ms: preempted, or the engine paused; the client read in time",
    ),
    "preemption or a slow client, in a log without waits": (
        request(tpot_ms=150.0, e2e_ms=15_110.0), BUSY, "stall", "it is one or the other",
    ),
    "slow client between tokens": (
        request(tpot_ms=150.0, e2e_ms=15_110.0, client_wait_ms=13_000.0), BUSY, "delivery", "client read slowly",
    ),
    "preemption of a request whose client read slowly for a moment": (
        request(tpot_ms=150.0, e2e_ms=15_110.0, client_wait_ms=3000.0), BUSY, "stall", "3,000 ms of waits",
    ),
    "slow client of a response that is not streamed": (
        request(stream=False, ttft_ms=None, tpot_ms=None, e2e_ms=9000.0, client_wait_ms=7000.0), BUSY, "delivery",
        "client read slowly",
    ),
    "slow client": (
        request(e2e_ms=12_110.0), BUSY, "delivery", "client read slowly",
    ),
    "client that stopped reading after a while": (
        request(outcome="client_abort", reason="client_stalled", completion_tokens=None, tpot_ms=None, e2e_ms=90_100.0,
                client_wait_ms=60_000.0),
        BUSY, "delivery", "stopped reading",
    ),
    "client that stopped reading": (
        request(outcome="client_abort", reason="client_stalled", completion_tokens=None, tpot_ms=None, e2e_ms=60_100.0),
        BUSY, "delivery", "stopped reading",
    ),
    "fallback": (
        request(attempt=2, tried="e0:connect_timeout", ttft_ms=5100.0, e2e_ms=7110.0), BUSY, "attempts",
        "attempt 2 succeeded after e0:connect_timeout",
    ),
    "rejection after a wait": (
        request(outcome="rejected", reason="queue_timeout", upstream=None, attempt=None, ttft_ms=None, tpot_ms=None,
                engine_queue_ms=None, engine_ttft_ms=None, completion_tokens=None, queue_ms=10_000.0, e2e_ms=10_001.0),
        [], "gateway_queue", "rejected (queue_timeout)",
    ),
    "all engines failed": (
        request(outcome="upstream_error", reason="connect", tried="e0:connect,e1:connect", ttft_ms=None, tpot_ms=None,
                engine_queue_ms=None, engine_ttft_ms=None, completion_tokens=None, e2e_ms=4000.0),
        BUSY, "attempts", "tried e0:connect,e1:connect",
    ),
    "slow network": (
        request(ttft_ms=5100.0, e2e_ms=7110.0), BUSY, "network", "",
    ),
    "response that is not streamed": (
        request(stream=False, ttft_ms=None, tpot_ms=None), BUSY, "decode", "in decode",
    ),
    "engine without times": (
        request(engine_queue_ms=None, engine_ttft_ms=None, ttft_ms=8100.0, e2e_ms=10_110.0), BUSY, "engine",
        "reports no queue and prefill time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_longest_phase_is_the_cause(situation: str):
    record, others, phase, cause = SITUATIONS[situation]
    first, *_ = blame(record, others)
    assert phase == first.phase
    assert first.share > 0.5
    assert cause in first.cause


def test_blame_reads_as_a_sentence():
    record, others, *_ = SITUATIONS["queue of the engine"]
    assert "79% engine queue: 23 others were waiting, 0 running" == str(blame(record, others)[0])


MS = st.none() | st.floats(0, 1e5)
RECORDS = st.builds(
    request,
    outcome=st.sampled_from(("ok", "rejected", "client_abort", "upstream_error", None)),
    reason=st.sampled_from((None, "client_stalled")),
    tried=st.sampled_from((None, "e0:connect")),
    upstream=st.sampled_from((None, "e1")),
    completion_tokens=st.none() | st.integers(0, 5000),
    queue_ms=MS, engine_queue_ms=MS, engine_ttft_ms=MS, ttft_ms=MS, tpot_ms=MS, e2e_ms=MS, client_wait_ms=MS,
)  # fmt: skip


@given(RECORDS)
def test_phases_sum_to_the_recorded_total(record: RequestRecord):
    phases = phases_of(record, BUSY)
    total = record.e2e_ms or 0.0
    assert total == pytest.approx(sum(phase.length_ms for phase in phases), abs=1e-6)
    assert all(phase.length_ms > 0 for phase in phases)
    assert all(
        one.start_ms + one.length_ms == pytest.approx(other.start_ms, abs=1e-6) for one, other in pairwise(phases)
    )
    shares = [one.share for one in blame(record, BUSY)]
    assert shares == sorted(shares, reverse=True)
    assert not phases or sum(shares) == pytest.approx(1.0)
