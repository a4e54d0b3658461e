"""The doctor decides: what is found at which figures, what is abstained from, in which order, and what the command
prints. Recorded situations of real engines stand in test_doctor_situations.py; here are hand-made ones, just before and
just after an edge."""

from __future__ import annotations

import gzip
import http.server
import itertools
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from alerts import thresholds
from alerts.settings import Overrides, Settings
from exporters.requests.record import RequestRecord
from stack.cli.doctor import doctor_command
from stack.doctor import advice, collect, report
from stack.doctor.checks.case import LEAST_REQUESTS
from stack.doctor.checks.decode import MANY_AT_ONCE
from stack.doctor.collect import evidence
from stack.doctor.diagnose import Diagnosis, areas, diagnose, ranked, serious, undecided
from stack.doctor.evidence import (
    AdapterEvidence,
    Clients,
    EngineSnapshot,
    GatewayEvidence,
    Gauge,
    ModelEvidence,
    Spread,
)
from stack.doctor.series import Pages, between
from stack.doctor.symptoms import ROWS
from tests.support.doctor_pages import pair, scraped, without_waiting

SITUATIONS = Path(__file__).parents[2] / "situations"
NOTHING = Gauge(0, 0, 0)


def spread(*values: float) -> Spread:
    found = Spread.of(values)
    assert found
    return found


def well(**changes: Any) -> EngineSnapshot:
    """A busy engine with nothing wrong: 100 requests in a minute, half a second to the first token, 30 ms between
    tokens."""
    figures = EngineSnapshot(
        seconds=60, begun=100, ended=100, finished={"stop": 100.0}, prompt_tokens=30_000, generation_tokens=10_000,
        lookups=30_000, hits=15_000,
        preemptions=0, http={"2xx": 100.0}, ttft=spread(*[0.5] * 100), between_tokens=spread(*[0.03] * 1000),
        per_token=spread(*[0.03] * 100),
        e2e=spread(*[4.0] * 100), queue=spread(*[0.01] * 100), prefill=spread(*[0.3] * 100),
        decode=spread(*[3.0] * 100),
        prompt_length=spread(*[300.0] * 100), answer_length=spread(*[100.0] * 100), running=Gauge(4, 6, 8),
        waiting=NOTHING, deferred=NOTHING,
        kv=Gauge(0.2, 0.3, 0.4), caching=True, still_s=0.0, steps=1_700,
    )  # fmt: skip
    figures = replace(figures, **changes)
    return (
        replace(figures, crowded=figures.running)
        if figures.waiting and figures.waiting.lowest > 0 and "crowded" not in changes
        else figures
    )


def of(figures: EngineSnapshot, engines: dict[str, EngineSnapshot] | None = None, **around: Any) -> Diagnosis:
    settings = around.pop("settings", Settings())
    return diagnose(
        ModelEvidence(model=around.pop("model", "m"), source="test", whole=figures, engines=engines or {}, **around),
        settings,
    )


def names(figures: EngineSnapshot, **around: Any) -> list[str]:
    return [finding.row.name for finding in of(figures, **around).findings]


# ---- nothing, and too little


def test_nothing_is_wrong_with_an_engine_that_is_well():
    diagnosis = of(well())
    assert ((), "busy") == (diagnosis.findings, diagnosis.state)
    assert {
        "queue": "fine",
        "prefill": "fine",
        "decode": "fine",
        "streaming": "unsure",
        "API": "fine",
        "quality": "unsure",
    } == areas(diagnosis)


IDLE = EngineSnapshot(
    seconds=60, begun=0, ended=0, running=NOTHING, waiting=NOTHING, prompt_tokens=0, generation_tokens=0
)


def test_empty_engine_page_is_idle_or_open():
    """An engine whose page shows nothing is idle and who waits before it is open unless somebody tells."""
    diagnosis = of(IDLE)
    assert ("idle", (), ["API", "quality"]) == (
        diagnosis.state,
        diagnosis.findings,
        [one.area for one in diagnosis.unsure],
    )
    text = report.as_text([diagnosis], "test")
    assert re.search(r"^m: idle: .* 0 requests in 60 s$", text, re.MULTILINE)
    assert "--gateway" in text
    told = of(IDLE, gateway=GatewayEvidence(running=NOTHING, waiting=NOTHING))
    assert ("idle", ["quality"]) == (told.state, [one.area for one in told.unsure])


def slow(requests: int, **changes: Any) -> EngineSnapshot:
    """So many requests, far too slow in everything."""
    return well(
        begun=requests,
        ended=requests,
        finished={"stop": float(requests)},
        http={"2xx": float(requests)},
        ttft=spread(*[30.0] * requests),
        queue=spread(*[25.0] * requests),
        between_tokens=spread(*[0.9] * requests),
        **changes,
    )


def test_handful_of_requests_is_abstained_from():
    """A handful of requests is abstained from and what is missing is said."""
    few, enough = of(slow(LEAST_REQUESTS - 1)), of(slow(LEAST_REQUESTS))
    assert ("thin", ()) == (few.state, few.findings)
    assert {"queue", "prefill", "decode"} <= {one.area for one in few.unsure}
    assert re.search(r"^9 requests in 60 s .*\b10\b", few.unsure[0].why)
    assert re.search(r" 80 s .*--for, --window", few.unsure[0].how)
    assert enough.findings


def test_a_moment_is_no_time_to_judge_by():
    assert [] == names(slow(50, seconds=4))
    assert names(slow(50, seconds=5, waiting=Gauge(1, 2, 3)))


def test_missing_values_leave_their_area_open():
    """Values that an engine does not show leave their area open."""
    diagnosis = of(well(queue=None, kv=None))
    assert "no request_queue_time_seconds and no kv_cache_usage_perc" in next(
        one.why for one in diagnosis.unsure if one.area == "queue"
    )


@given(
    st.builds(
        EngineSnapshot,
        seconds=st.floats(1, 1e5),
        begun=st.floats(0, 1e6),
        ended=st.floats(0, 1e6),
        preemptions=st.floats(0, 1e5),
        prompt_tokens=st.floats(0, 1e9),
        generation_tokens=st.floats(0, 1e9),
        lookups=st.floats(0, 1e9),
        hits=st.floats(0, 1e9),
        drafted=st.floats(0, 1e9),
        accepted=st.floats(0, 1e9),
        finished=st.dictionaries(st.sampled_from(["stop", "error"]), st.floats(0, 1e6)),
        rejections=st.dictionaries(st.sampled_from(["max_num_queued_reqs"]), st.floats(0, 1e6)),
        running=st.builds(Gauge, *[st.floats(0, 500)] * 3),
        waiting=st.builds(Gauge, *[st.floats(0, 500)] * 3),
        kv=st.builds(Gauge, *[st.floats(0, 1)] * 3),
        caching=st.booleans(),
        **{
            name: st.none() | st.lists(st.floats(0.001, 1e4), min_size=1, max_size=5).map(Spread.of)
            for name in ("ttft", "between_tokens", "per_token", "queue", "prefill", "decode", "prompt_length")
        },
    )
)
def test_confidence_is_a_share_for_any_values(figures):
    """Whatever the values quality is never found and confidence is a share."""
    diagnosis = of(figures)
    assert "quality" not in {finding.row.area for finding in diagnosis.findings}
    assert "quality" in {one.area for one in diagnosis.unsure}
    assert all(0 <= finding.confidence <= 1 for finding in diagnosis.findings)
    assert len(diagnosis.findings) == len({finding.name for finding in diagnosis.findings})


# ---- whose is it


DRAFTED = {"between_tokens": spread(*[0.3] * 1000), "drafts": 500, "drafted": 1500, "accepted": 1200}
QUEUED = {"queue": spread(*[8.0] * 100), "ttft": spread(*[8.5] * 100), "waiting": Gauge(5, 10, 20)}


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({**QUEUED, "running": Gauge(8, 8, 8)}, "queue-bound"),
        ({**QUEUED, "running": Gauge(2, 5, 8)}, "queue-at-capacity"),
        ({**QUEUED, "running": Gauge(8, 8, 8), "between_tokens": spread(*[0.2] * 900)}, "queue-at-capacity"),
        ({**QUEUED, "running": Gauge(8, 8, 8), "kv": Gauge(0.7, 0.8, 0.85)}, "queue-at-capacity"),
        ({**QUEUED, "running": Gauge(8, 8, 8), "kv": Gauge(0.8, 0.9, 0.95)}, "kv-full"),
        ({**QUEUED, "running": Gauge(8, 8, 8), "preemptions": 30}, "kv-bound"),
        ({"prefill": spread(*[4.0] * 100), "ttft": spread(*[4.0] * 100)}, "prefill-bound"),
        ({"prefill": spread(*[9.0] * 100), "ttft": spread(*[9.0] * 100), "hits": 300}, "prefill-bound"),
        ({"prefill": spread(*[4.0] * 100), "ttft": spread(*[4.0] * 100), "hits": 300}, "unique-prompts"),
        (
            {"prefill": spread(*[4.0] * 100), "ttft": spread(*[4.0] * 100), "caching": False, "hits": 0, "lookups": 0},
            "cache-off",
        ),
        (
            {
                "prefill": spread(*[4.0] * 100),
                "ttft": spread(*[4.0] * 100),
                "hits": 0,
                "prompt_length": spread(*[40.0] * 100),
            },
            "prefill-bound",
        ),
        ({"between_tokens": spread(*[0.2] * 1000), "per_token": spread(*[0.2] * 100)}, "decode-bound"),
        ({"between_tokens": spread(*[0.2] * 1000), "running": Gauge(40, MANY_AT_ONCE + 1, 60)}, "decode-at-batch"),
        ({**DRAFTED, "per_token": spread(*[0.2] * 100)}, "decode-drafted"),
        ({**DRAFTED, "per_token": spread(*[0.2] * 100), "running": Gauge(40, MANY_AT_ONCE + 1, 60)}, "decode-at-batch"),
        ({**DRAFTED, "per_token": None}, "decode-drafted"),
        ({"ttft": spread(*[4.0] * 100)}, "api-server-bound"),
    ],
)
def test_the_first_finding_is_the_cause(changes, row):
    diagnosis = of(well(**changes))
    assert row == diagnosis.findings[0].row.name
    assert diagnosis.findings[0].serious


@pytest.mark.parametrize(
    ("threshold", "changes"),
    [
        (thresholds.TTFT_P95, {"ttft": spread(*[2.6] * 100), "prefill": spread(*[2.5] * 100)}),
        (thresholds.QUEUE_TIME_P95, {"queue": spread(*[5.1] * 100), "waiting": Gauge(1, 2, 3)}),
        (thresholds.INTER_TOKEN_P95, {"between_tokens": spread(*[0.11] * 1000)}),
        (thresholds.PREEMPTIONS, {"preemptions": 7}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_own_threshold_is_used(threshold, changes):
    """A deployment's own number is what a value is held against."""
    assert names(well(**changes))
    own = Settings(Overrides(thresholds={threshold.name: threshold.value * 1.5}))
    assert [] == names(well(**changes), settings=own)
    finding = of(well(**changes)).findings[0]
    assert threshold.name in {fact.limit.name for fact in finding.facts if fact.limit}


def test_unused_prefixes_are_a_remark_without_queue():
    """Prompts of which nothing is reused are told and not serious while nobody waits."""
    diagnosis = of(well(hits=100, prefill=spread(*[1.0] * 100)))
    assert [("unique-prompts", False)] == [(finding.name, finding.serious) for finding in diagnosis.findings]
    assert [] == names(well(hits=100, prefill=spread(*[0.01] * 100))), "a hundredth of the time is not worth a change"


def test_a_long_prompts_own_late_first_token_is_no_head_of_line():
    """Of ten requests one is long: that it is late itself is what it asked for. That three are, is."""
    long = {"prompt_length": spread(*[200.0] * 90, *[20_000.0] * 10), "prefill": spread(*[0.1] * 90, *[5.0] * 10)}
    own = well(**long, ttft=spread(*[0.2] * 90, *[6.0] * 10))
    others = well(**long, ttft=spread(*[0.2] * 70, *[6.0] * 30))
    assert "head-of-line-first" not in names(own)
    assert "head-of-line-first" in names(others)


def test_late_first_token_asks_for_another_option():
    """Whoever runs is served first: smaller steps leave a prompt that waits just as far behind, a cap on the long one
    does not."""
    long = {"prompt_length": spread(*[200.0] * 95, *[20_000.0] * 5), "prefill": spread(*[0.1] * 95, *[3.0] * 5)}
    late = of(
        well(**long, ttft=spread(*[0.2] * 70, *[6.0] * 30), between_tokens=spread(*[0.02] * 950, *[2.0] * 50))
    ).findings[0]
    paused = of(well(**long, between_tokens=spread(*[0.02] * 950, *[2.0] * 50))).findings[0]
    assert ("head-of-line", "head-of-line") == (late.name, paused.name)
    assert "--long-prefill-token-threshold" in late.row.lever
    assert "--max-num-batched-tokens" in paused.row.lever


def test_short_pause_is_reported_without_urgency():
    """A short pause in a hundred is told and nobody is called for it."""
    long = spread(*[200.0] * 95, *[20_000.0] * 5)

    def found(pause_s: float) -> list[tuple[str, bool]]:
        figures = well(prompt_length=long, between_tokens=spread(*[0.02] * 970, *[pause_s] * 30))
        return [(finding.name, finding.serious) for finding in of(figures).findings]

    assert [("head-of-line", False)] == found(0.15)
    assert [("head-of-line", True)] == found(0.8)


def test_gap_is_a_step_of_several_drafted_tokens():
    """Four tokens each 0.2 s are twenty a second, twice as fast as people read."""
    assert [] == names(
        well(
            between_tokens=spread(*[0.2] * 500),
            per_token=spread(*[0.05] * 100),
            drafts=500,
            drafted=2000,
            accepted=1500,
        )
    )


CHUNKS = {"prompt_tokens": 200_000, "lookups": 200_000, "hits": 60_000, "prompt_length": spread(*[2000.0] * 100)}


def test_gaps_that_prompt_chunks_make_are_not_decode_bound():
    """n-gram drafts do not shorten a step that computes prompts."""
    some, most = spread(*[0.02] * 900, *[0.2] * 100), spread(*[0.2] * 1000)
    assert ["prefill-interference"] == names(well(**CHUNKS, between_tokens=some))
    assert ["prefill-interference"] == names(well(**{**CHUNKS, "prompt_tokens": 900_000}, between_tokens=most))
    assert ["decode-bound"] == names(well(**{**CHUNKS, "prompt_tokens": 80_000}, between_tokens=some)), (
        "too few prompt tokens to lengthen a step"
    )
    assert ["decode-bound"] == names(well(**CHUNKS, between_tokens=most)), "steps are long with and without prompts"
    report_ = report.as_text([of(well(**CHUNKS, between_tokens=some))], "test")
    assert re.search(r"first step +Smaller steps: `--max-num-batched-tokens`", report_)


LONG_PROMPTS = {
    "prompt_tokens": 300_000, "lookups": 300_000, "hits": 0, "prompt_length": spread(*[20_000.0] * 15), "begun": 15,
    "ended": 15, "steps": 1_200,
    "prefill": spread(*[3.8] * 15), "queue": spread(*[0.2] * 15), "ttft": spread(*[4.0] * 15),
    "decode": spread(*[3.6] * 15),
}  # fmt: skip


def test_small_steps_come_before_unused_prefixes():
    """Prompts of 20,000 tokens that take 3.8 s in steps of 45 ms: some 240 tokens a step."""
    small, larger = spread(*[0.045] * 1400), spread(*[0.045] * 1200, *[0.6] * 200)
    assert ["small-steps", "unique-prompts"] == names(well(**LONG_PROMPTS, between_tokens=small))
    assert "small-steps" not in names(well(**LONG_PROMPTS, between_tokens=larger)), (
        "a moment falls into a step of 0.4 s"
    )
    assert "small-steps" not in names(
        well(**{**LONG_PROMPTS, "prompt_length": spread(*[3000.0] * 15)}, between_tokens=small)
    )
    loud = of(well(**LONG_PROMPTS, between_tokens=spread(*[0.11] * 1100)))
    assert "prefill-interference" not in [one.name for one in loud.findings], "its lever is the opposite"


def test_the_size_of_a_step_is_asked_for_where_it_cannot_be_told():
    alone = well(**{**LONG_PROMPTS, "steps": 300}, between_tokens=spread(*[0.005] * 1400))
    assert "unique-prompts" == of(alone).findings[0].name
    assert "max_num_batched_tokens below 2048, raise that first" in report.as_text([of(alone)], "test")


def test_late_first_token_explained_by_a_step():
    """A late first token is not the api servers while a step explains it or the ends are of other requests."""
    late = {"ttft": spread(*[4.0] * 100)}
    assert "api-server-bound" in names(well(**late))
    for other in (
        {"between_tokens": spread(*[0.02] * 950, *[4.5] * 50)},
        {"ended": 60},
        {"waiting": Gauge(0, 2, 4)},
        {"prefill": spread(*[3.5] * 100)},
    ):
        assert "api-server-bound" not in names(well(**late, **other))


def test_two_late_requests_are_no_pattern_however_few_there_are():
    """After a start the first ones are slow; the p95 of a dozen is one of them."""
    twelve = {"begun": 12, "ended": 12, "queue": spread(*[0.01] * 12)}

    def slow(late: int) -> list[str]:
        times = spread(*[4.0] * late, *[0.3] * (12 - late))
        return names(well(**twelve, ttft=times, prefill=times))

    assert [] == slow(2)
    assert ["prefill-bound"] == slow(3)


def test_full_cache_is_serious_only_with_a_queue():
    """A full cache is serious only where somebody waits for it."""
    full = {"kv": Gauge(0.9, 0.92, 0.94), "waiting": Gauge(1, 2, 3)}

    def found(**changes: Any) -> list[tuple[str, bool]]:
        return [(finding.row.name, finding.serious) for finding in of(well(**full, **changes)).findings]

    assert [("kv-full", False)] == found(queue=spread(*[0.6] * 100))
    assert [("kv-full", True)] == found(queue=spread(*[6.0] * 100))


def test_embeddings_get_no_cache_advice():
    """Embeddings are not told to switch on a cache that their model may not have."""
    pooling = {"generation_tokens": 0, "between_tokens": None, "per_token": None, "decode": spread(*[0.0] * 100)}
    assert [] == names(well(**pooling, caching=False, hits=None, lookups=None))
    assert [] == names(well(**pooling, hits=0))
    assert "second token" in next(one.why for one in of(well(**pooling)).unsure if one.area == "decode")


def test_head_of_line_needs_a_few_long_prompts():
    """Pauses of those who are answered are head of line only where a few prompts explain them."""
    paused = {"between_tokens": spread(*[0.02] * 950, *[2.0] * 50)}
    long = {"prompt_length": spread(*[200.0] * 95, *[20_000.0] * 5), "prefill": spread(*[0.1] * 95, *[3.0] * 5)}
    assert "head-of-line" in names(well(**long, **paused))
    assert "head-of-line" not in names(well(**paused))


def test_a_tail_far_longer_than_any_prefill_is_not_from_prompts():
    """After a core stood still for a minute first tokens are late, beside the same few long prompts as ever."""
    stood = {
        "prompt_length": spread(*[200.0] * 95, *[1200.0] * 5), "prefill": spread(*[0.05] * 95, *[0.4] * 5),
        "ttft": spread(*[0.1] * 80, *[62.0] * 20), "between_tokens": spread(*[0.02] * 990, *[60.0] * 20),
    }  # fmt: skip
    assert [] == [name for name in names(well(**stood)) if name.startswith(("head-of-line", "api-server"))]


def test_a_core_that_stood_still_is_no_busy_api_server():
    late = {"ttft": spread(*[4.0] * 100)}
    assert "api-server-bound" not in names(well(**late, between_tokens=spread(*[0.02] * 999, 60.0)))


# ---- what people wait for in a queue


CROWD = {**QUEUED, "waiting": Gauge(0, 12, 28), "kv": Gauge(0.0, 0.001, 0.002)}


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        # Prometheus, with calm minutes before
        ({"running": Gauge(0, 5, 16), "crowded": Gauge(16, 16, 16)}, "queue-bound"),
        # one look between two batches
        ({"running": Gauge(4, 15, 16), "crowded": Gauge(4, 15.2, 16, looks=15)}, "queue-bound"),
        ({"running": Gauge(4, 10, 16), "crowded": Gauge(4, 10, 16, looks=2)}, "queue-unclear"),
        ({"running": Gauge(0, 8, 16), "crowded": Gauge(16, 16, 16, looks=1)}, "queue-unclear"),
        ({"running": Gauge(2, 8, 16), "crowded": Gauge(2, 8, 16, looks=15)}, "queue-at-capacity"),
        (
            {"running": Gauge(12, 14, 16), "crowded": Gauge(12, 14, 16, looks=15), "kv": Gauge(0.5, 0.6, 0.7)},
            "queue-at-capacity",
        ),
    ],
)
def test_limit_is_seen_by_running_while_others_wait(changes, row):
    """Places are told by what runs while others wait and two looks may not tell."""
    assert [row] == names(well(**{**CROWD, **changes}))


COMPUTED_ANEW = {
    **CROWD,
    "prompt_tokens": 400_000,
    "hits": 0,
    "lookups": 0,
    "caching": False,
    "prompt_length": spread(*[4000.0] * 100),
}


def test_disabled_cache_comes_before_its_queue():
    """vLLM counts the wait for a place in a step as queue time, so prompts that are computed anew look like a want of
    engines."""
    queue = {"running": Gauge(4, 10, 16), "crowded": Gauge(4, 10, 16, looks=20)}
    diagnosis = of(well(**COMPUTED_ANEW, **queue))
    assert [("cache-off", True), ("queue-bound", True)] == [(one.name, one.serious) for one in diagnosis.findings]
    assert ": 235 tokens; over prompt_work, 64 tokens\n" in report.as_text([diagnosis], "test")
    on = {"caching": True, "lookups": 400_000}
    unique = of(well(**{**COMPUTED_ANEW, **queue, **on}))
    assert [("queue-bound", True), ("unique-prompts", False)] == [(one.name, one.serious) for one in unique.findings]
    assert ["queue-at-capacity"] == names(well(**{**COMPUTED_ANEW, **queue, **on, "hits": 200_000}))


def test_a_cache_that_is_off_is_not_why_answers_wait_for_places():
    """Few prompt tokens in a step: the answers are what takes the time."""
    places = {"running": Gauge(16, 16, 16), "crowded": Gauge(16, 16, 16, looks=20)}
    assert ["queue-bound"] == names(well(**{**COMPUTED_ANEW, "prompt_tokens": 40_000, "steps": 10_000}, **places))
    assert ["queue-bound"] == names(well(**{**COMPUTED_ANEW, "prompt_length": spread(*[100.0] * 100)}, **places))


def test_queue_is_serious_where_its_alert_fires():
    """VLLMQueueGrowing: over ten for ten minutes, and ten more than at the beginning."""
    kept = {
        "waiting": Gauge(12, 14, 24),
        "running": Gauge(16, 16, 16),
        "queue": spread(*[1.0] * 100),
        "ttft": spread(*[1.5] * 100),
    }

    def loud(**changes: Any) -> list[tuple[str, bool]]:
        return [(one.name, one.serious) for one in of(well(**kept, **changes)).findings]

    assert [("queue-bound", False)] == loud(seconds=60, queue_rise=12.0) == loud(seconds=600, queue_rise=9.0)
    assert [("queue-bound", True)] == loud(seconds=600, queue_rise=10.0)
    assert [("kv-bound", False)] == loud(kv=Gauge(0.8, 0.9, 0.95))
    gate = GatewayEvidence(waiting=Gauge(12, 14, 16), slots=Gauge(8, 8, 8))
    told = Clients(source="log", outcomes={"ok": 100.0}, queue=spread(*[1.0] * 100))
    assert [("gateway-queue", False)] == [
        (one.name, one.serious) for one in of(well(), gateway=gate, clients=told).findings
    ]


def test_a_queue_that_nobody_sees_is_no_finding_but_a_question():
    """Those who ended had waited: the crowd is gone."""
    diagnosis = of(well(queue=spread(*[8.0] * 100), ttft=spread(*[8.5] * 100), running=Gauge(0, 1, 2)))
    assert () == diagnosis.findings
    (queue,) = (one for one in diagnosis.unsure if one.area == "queue")
    assert "8 s on average" in queue.why
    assert "--for" in queue.how


def test_standing_queue_is_reported_early():
    """Long answers: half a minute after the crowd came nobody has ended."""
    standing = {
        "seconds": 15.7,
        "begun": 3,
        "ended": 0,
        "waiting": Gauge(24, 26, 28),
        "running": Gauge(16, 16, 16),
        "queue": None,
        "prefill": None,
    }
    diagnosis = of(well(**standing))
    assert ("thin", [("queue-bound", True)]) == (
        diagnosis.state,
        [(one.row.name, one.serious) for one in diagnosis.findings],
    )
    assert "queue" not in {one.area for one in diagnosis.unsure}
    assert ["queue-bound"] == names(well(**{**standing, "begun": 16})), "and when many began and none ended"
    assert [] == names(well(**{**standing, "waiting": Gauge(10, 12, 14)}))
    assert [] == names(well(**{**standing, "prompt_tokens": 0, "generation_tokens": 0, "seconds": 14})), (
        "it may stand still"
    )


def test_gateway_rejections_with_engine_queue_are_fine():
    """What the gateway refuses while an engine queues is what it is there for."""
    refused = Clients(
        source="log", outcomes={"ok": 50, "rejected": 50}, reasons={"queue_ttl": 49.6}, refused={"batch": 49.6}
    )
    queues = well(**QUEUED, running=Gauge(8, 8, 8))
    assert ["queue-bound", "rejections-by-gateway"] == names(queues, clients=refused)
    few = GatewayEvidence(slots=Gauge(16, 20, 24), slots_limit=Gauge(64, 64, 64))
    assert [("rejections", False)] == [
        (one.name, one.serious) for one in of(well(), clients=refused, gateway=few).findings
    ]
    all_of_them = replace(few, slots=few.slots_limit)
    (found,) = of(well(), clients=refused, gateway=all_of_them).findings
    assert (
        True,
        "vllm-watch annotate \"slots 64 -> 80\" --diff 'slots=64->80' --id rejections-by-gateway --events events.jsonl",
    ) == (
        found.serious,
        report.as_json([of(well(), clients=refused, gateway=all_of_them)], "test")["first_step"]["commands"][0],
    )
    assert "refused by queue_ttl: 50" in report.as_text([of(well(), clients=refused)], "test")


# ---- what is not latency


def test_early_stall_is_reported_by_the_gateway():
    """An engine that stood still before its page showed a request is told by the gateway."""
    holds = GatewayEvidence(running=Gauge(6, 8, 9), waiting=Gauge(2, 3, 4))
    diagnosis = of(IDLE, gateway=holds)
    assert ["frozen-engine"] == [finding.name for finding in diagnosis.findings]
    assert "frozen-engine" not in names(IDLE, gateway=replace(holds, only=False)), (
        "they may be at engines that were not looked at"
    )
    assert [] == names(IDLE, gateway=replace(holds, running=Gauge(0, 4, 9)))
    assert "frozen-engine" not in names(well(), gateway=holds)


def test_frozen_engine_is_found_without_requests():
    """A frozen engine is found without a single request and the surer the more stand still."""

    def frozen(running: float, seconds: float) -> EngineSnapshot:
        return EngineSnapshot(
            seconds=seconds,
            begun=0,
            ended=0,
            prompt_tokens=0,
            generation_tokens=0,
            running=Gauge(running, running, running),
            waiting=NOTHING,
        )

    one, several = of(frozen(1, 30)).findings[0], of(frozen(8, 30)).findings[0]
    assert ("frozen-engine", True) == (one.name, one.serious)
    assert one.confidence < several.confidence
    assert [] == names(replace(frozen(8, 30), generation_tokens=1.0))
    short = of(frozen(8, 14))
    assert ((), "look for 30 s (--for)") == (short.findings, next(one.how for one in short.unsure if one.area == "API"))
    assert [] == names(replace(frozen(8, 30), running=Gauge(0, 4, 8))), "it had nothing to do at one scrape"


def test_an_engine_that_stops_within_the_look_is_never_fine():
    """20 s before the end it is found, 14 s before it the look was too short, and of two pages nothing is known."""
    late, later, unknown = (of(well(still_s=still_s)) for still_s in (40.0, 14.0, None))
    assert [("frozen-engine", True)] == [(one.name, one.serious) for one in late.findings]
    assert ((), True) == (later.findings, undecided([later]))
    assert {"unsure"} == {areas(later)[area] for area in ("queue", "prefill", "decode", "API")}
    assert ("unsure", False) == (areas(unknown)["API"], undecided([unknown]))
    one_of_two = of(well(), engines={"a": well(), "b": well(still_s=40.0)})
    assert [("frozen-engine", "b")] == [(one.name, one.engine) for one in one_of_two.findings]
    assert undecided([of(well(), engines={"a": well(), "b": well(still_s=14.0)})])
    assert [] == names(well(still_s=4.0)), "a pause between two looks"
    held = Gauge(2, 2, 2)
    chunks = EngineSnapshot(
        seconds=30, begun=0, ended=0, prompt_tokens=0, generation_tokens=0, running=held, waiting=NOTHING, still_s=0.0
    )
    assert [] == names(chunks), "one long prefill, of which each chunk moves the use of the cache"
    assert ["frozen-engine"] == names(replace(chunks, still_s=None))


def test_state_decides_whether_an_engine_is_hung():
    """Hung is found also while idle; what is planned, or waits for another engine, is no finding."""
    still = well(still_s=40.0)
    for idle_or_not in (IDLE, still, well()):
        hung = of(replace(idle_or_not, states={"a:1": ("hung", "probe_silent")}))
        assert [("frozen-engine", True, 1.0)] == [(one.name, one.serious, one.confidence) for one in hung.findings]
        assert "hung (probe_silent): 1\n" in report.as_text([hung], "test")
    for state in (("draining", "asleep"), ("scaling", "elastic_ep"), ("slow", "kv_fetch")):
        assert [] == names(replace(still, states={"a:1": state}))
    for state in (("suspect", "steps_stopped"), ("healthy", "steps")):
        assert ["frozen-engine"] == names(replace(still, states={"a:1": state}))
    one_of_two = of(well(states={"b": ("hung", "x")}), engines={"a": well(), "b": well(states={"b": ("hung", "x")})})
    assert [("frozen-engine", "b")] == [(one.name, one.engine) for one in one_of_two.findings]


def test_an_engine_that_stops_answering_is_frozen():
    assert ["frozen-api-server"] == names(well(silent_s=20.0))
    assert undecided([of(well(silent_s=12.0))])


def test_rejecting_engine_is_found_by_its_counter():
    """An engine that refuses is found by its counter whatever its answers look like."""
    assert ["rejections"] == names(well(rejections={"max_num_queued_reqs": 10.0}))
    assert [] == names(well(rejections={"max_num_queued_reqs": 9.0}))
    assert [] == names(well(rejections={"max_num_queued_reqs": 25.0}, seconds=900)), (
        "the number is meant for five minutes"
    )


def test_refusals_by_the_engine_are_no_errors():
    assert ["rejections"] == names(well(rejections={"max_num_queued_reqs": 40.0}, http={"2xx": 100.0, "5xx": 20.0}))
    assert ["errors"] == names(well(http={"2xx": 100.0, "5xx": 20.0}))


def clients(**outcomes: float) -> Clients:
    return Clients(source="the request log", outcomes=outcomes)


def test_log_tells_errors_disconnects_and_rejections():
    """Errors disconnects and refusals are told by the log where there is one."""
    assert ["errors"] == names(well(), clients=clients(ok=95, upstream_error=5))
    assert ["client-disconnects"] == names(well(), clients=clients(ok=80, client_abort=20))
    assert [] == names(well(), clients=clients(ok=95, client_abort=5))
    refused = Clients(
        source="log", outcomes={"ok": 50, "rejected": 50}, reasons={"est_wait": 50}, refused={"batch": 50}
    )
    assert ["rejections-by-gateway"] == names(well(), clients=refused)
    assert ["rejections-by-team-limit"] == names(well(), clients=replace(refused, reasons={"team_limit": 50}))
    assert ["wrong-requests"] == names(well(), clients=replace(refused, reasons={"unknown_key": 50}))


def test_disconnects_from_two_engine_histograms():
    """vLLM's abort counter stays at 0; what began, neither ended nor runs is gone."""
    assert ["client-disconnects"] == names(well(begun=100, ended=75))
    assert [] == names(well(begun=100, ended=92)), "eight may still run"


def test_whoever_waits_again_after_a_preemption_has_not_left():
    thrashing = {"begun": 30, "ended": 5, "running": Gauge(0, 6, 12), "preemptions": 40}
    assert "client-disconnects" not in names(well(**thrashing, waiting=Gauge(0, 5, 10)))
    assert "client-disconnects" in names(well(**thrashing, waiting=NOTHING))


def test_preemptions_are_told_before_ten_requests_have_ended():
    """Long answers preempt each other for minutes before one of them is complete."""
    diagnosis = of(well(begun=3, ended=3, preemptions=60))
    assert ("thin", ["kv-bound"]) == (diagnosis.state, [finding.row.name for finding in diagnosis.findings])


def test_end_of_request_values_may_be_missing():
    """What is told at the end of a request is not said to be missing while none ended."""
    diagnosis = of(well(begun=20, ended=0, running=Gauge(0, 10, 20), queue=None, prefill=None, decode=None, e2e=None))
    assert "no request ended" in next(one.why for one in diagnosis.unsure if one.area == "queue")


def test_requests_that_are_held_back_are_told():
    assert ["deferred-requests"] == names(well(deferred=Gauge(3, 3, 4)))
    assert [] == names(well(deferred=Gauge(0, 2, 4)))


def test_drafts_that_are_thrown_away_are_told():
    assert ["speculative-decoding"] == names(well(drafts=1000, drafted=3000, accepted=900))
    assert [] == names(well(drafts=1000, drafted=3000, accepted=1300))


def test_gateway_queue_counts_while_engine_has_room():
    """A queue in the gateway is its own only while the engine has room."""
    waits = {
        "clients": Clients(source="log", outcomes={"ok": 100.0}, queue=spread(*[9.0] * 100)),
        "gateway": GatewayEvidence(waiting=Gauge(12, 15, 20), running=Gauge(4, 4, 4), slots=Gauge(4, 4, 4)),
    }
    assert ["gateway-queue"] == names(well(), **waits)
    assert "gateway-queue" not in names(well(waiting=Gauge(3, 4, 5)), **waits)
    assert "gateway-queue" not in names(well(kv=Gauge(0.8, 0.85, 0.9)), **waits)


def test_largest_team_is_named_only_with_a_queue():
    """The team that has most is named where something waits and only there."""
    crowd = {"clients": Clients(source="log", outcomes={"ok": 100.0}, teams={"batch": 80, "chat": 20})}
    assert [] == names(well(), **crowd)
    assert ["one-team", "queue-bound"] == names(well(**QUEUED, running=Gauge(8, 8, 8)), **crowd)
    waits = {**crowd, "gateway": GatewayEvidence(waiting=Gauge(12, 15, 20), teams={"batch": 18, "chat": 2})}
    assert ["gateway-queue", "one-team"] == names(well(), **waits), "the engine has room: nobody need have less"


def test_a_slow_adapter_is_found_unless_its_prompts_are_longer():
    """Compared with all other requests, and only with enough of both."""

    def of(adapter: float, rest: float, *, count: int = 40, tokens: float = 100) -> dict[str, Any]:
        groups = {
            "law": AdapterEvidence(spread(*[adapter] * count), spread(*[tokens] * count)),
            None: AdapterEvidence(spread(*[rest] * 60), spread(*[100.0] * 60)),
            "code": AdapterEvidence(spread(*[rest] * 30)),
        }
        return {"clients": Clients(source="log", outcomes={"ok": 100.0}, adapters=groups)}

    assert ["slow-adapter"] == names(well(), **of(9.0, 0.5))
    records = [
        RequestRecord(request_id="a", adapter="law", outcome="ok", ttft_ms=9000, prompt_tokens=7),
        RequestRecord(request_id="b", adapter="law", outcome="timeout", ttft_ms=90000),
        RequestRecord(request_id="c", outcome="ok", ttft_ms=500),
        RequestRecord(request_id="d", adapter="code", outcome="ok"),
    ]
    assert {"law": AdapterEvidence(spread(9.0), spread(7)), None: AdapterEvidence(spread(0.5))} == (
        collect._of_log(records).adapters
    )
    for alike in (of(0.9, 0.5), of(9.0, 8.0), of(9.0, 0.5, count=9), of(9.0, 0.5, tokens=5000)):
        assert [] == names(well(), **alike)


def test_slow_stream_differs_from_slow_engine():
    """A stream that is slow on its way is told from a slow engine."""
    late = {"clients": Clients(source="log", outcomes={"ok": 100.0}, tpot=spread(*[0.2] * 100))}
    assert ["slow-streaming"] == names(well(), **late)
    assert ["slow-gateway"] == names(well(), **late, gateway=GatewayEvidence(lag=spread(*[0.05] * 100)))
    assert ["decode-bound"] == names(well(between_tokens=spread(*[0.2] * 1000), per_token=spread(*[0.2] * 100)), **late)


# ---- several engines, several models, order


def test_the_engine_that_stands_out_is_named():
    slow_one = well(**QUEUED, running=Gauge(8, 8, 8))
    both = of(slow_one, {"a": slow_one, "b": slow_one})
    one = of(slow_one, {"a": slow_one, "b": well()})
    hidden = of(well(), {"a": slow_one, "b": well(), "c": well()})
    assert ["", "a", "a"] == [diagnosis.findings[0].engine for diagnosis in (both, one, hidden)]


def test_one_sided_queue_is_the_balancers():
    """A queue at one engine is the balancers while another has room."""
    full, room = well(**QUEUED, running=Gauge(8, 8, 8)), well(begun=12, ended=12, running=Gauge(0, 1, 3))
    assert [("queue-uneven", "a")] == [(one.row.name, one.engine) for one in of(full, {"a": full, "b": room}).findings]
    busy = replace(room, running=Gauge(4, 6, 8))
    assert ["queue-bound"] == names(full, engines={"a": full, "b": busy})
    assert ["queue-bound"] == names(full, engines={"a": full, "b": full})


def test_findings_sort_by_action_then_cause():
    """What somebody must act on comes first and causes before what they cause."""
    figures = well(
        **QUEUED,
        running=Gauge(8, 8, 8),
        preemptions=60,
        rejections={"max_num_queued_reqs": 50.0},
        drafts=10,
        drafted=900,
        accepted=90,
    )
    assert ["kv-bound", "rejections", "speculative-decoding"] == names(figures)


def test_more_evidence_and_a_figure_further_over_make_it_surer():
    def confidence(requests: int, ttft_s: float) -> float:
        figures = slow(requests, running=Gauge(8, 8, 8), waiting=Gauge(1, 2, 3))
        return (
            of(replace(figures, queue=spread(*[ttft_s] * requests), ttft=spread(*[ttft_s] * requests)))
            .findings[0]
            .confidence
        )

    assert confidence(20, 30.0) < confidence(50, 30.0) < confidence(100, 30.0)
    assert confidence(100, 6.0) < confidence(100, 30.0)


def test_one_lever_is_the_first_over_all_models():
    bad = well(**QUEUED, running=Gauge(8, 8, 8))
    diagnoses = [of(bad, clients=clients(ok=60, client_abort=40)), of(well(preemptions=600), model="other")]
    told = report.as_json(diagnoses, "test")
    assert ["lever"] == [key for finding in told["findings"] for key in ("lever",) if key in finding]
    assert 2 <= len([finding for finding in told["findings"] if "after_that" in finding])
    assert ("kv-bound", "other") == (told["first_step"]["finding"], told["first_step"]["model"])
    text = report.as_text(diagnoses, "test")
    assert (1, 2) == (text.count("first step"), text.count("after that"))


@pytest.mark.parametrize("row", [row for row in ROWS if row.area != "quality"], ids=lambda row: row.name)
def test_every_row_is_reached_by_some_check(row):
    """A row that nothing finds is a promise of the page that the doctor does not keep."""
    folder = Path(report.__file__).parent
    source = "".join(path.read_text() for path in (*(folder / "checks").glob("*.py"), folder / "diagnose.py"))
    assert f'"{row.name}"' in source


# ---- how it is told


def test_option_values_come_from_the_engine():
    """Numbers of a option are those of the engine or placeholders."""

    def change(figures: EngineSnapshot, **around: Any) -> str:
        return next(line for line in report.as_text([of(figures, **around)], "test").splitlines() if "annotate" in line)

    queue = well(**QUEUED, running=Gauge(16, 16, 16))
    assert "max-num-seqs 16 -> 24" in change(queue)
    assert "max-num-seqs OLD -> 5" in change(well(preemptions=60, running=Gauge(5, 6, 7)))
    assert "max-num-seqs OLD -> NEW" in change(queue, engines={"a": queue, "b": queue})
    assert "--max-num-seqs 16" in report.as_json([of(queue)], "test")["first_step"]["experiment"]


def test_a_percentile_in_a_wide_bucket_is_its_bounds():
    """91 s in the queue and 70 s to the first token cannot be: one is from 60 to 120, the other from 40 to 80."""
    inf = float("inf")
    queue = Spread(100, 6000.0, ((30.0, 5.0), (60.0, 40.0), (120.0, 100.0), (inf, 100.0)))
    ttft = Spread(100, 6100.0, ((20.0, 5.0), (40.0, 40.0), (80.0, 100.0), (inf, 100.0)))
    text = report.as_text([of(well(**{**QUEUED, "queue": queue, "ttft": ttft}, running=Gauge(8, 8, 8)))], "test")
    assert "queue time p95: 60 to 120 s; over queue_time_p95, 5 s" in text
    assert "first token p95: 40 to 80 s" in text


def test_a_percentile_beyond_the_buckets_is_the_bound():
    """As on panels and in the terminal; the mean beside it is exact."""
    inf = float("inf")
    first = Spread(100, 0.2, ((0.3, 100.0), (0.5, 100.0), (inf, 100.0)))
    beyond = Spread(100, 9e5, ((0.3, 0.0), (7680.0, 10.0), (inf, 100.0)))
    assert ((0.0, 0.3), (7680.0, inf)) == (first.around(95), beyond.around(95))
    assert "queue (queue time p95: < 300 ms)" in report.as_text([of(well(queue=first))], "test")
    assert "first token p95: > 7,680 s" in report.as_text(
        [of(well(**{**QUEUED, "ttft": beyond}, running=Gauge(8, 8, 8)))], "test"
    )


def test_finding_has_one_sentence_and_its_value():
    """One sentence is said once and of what is fine the value."""
    assert "queue, prefill, decode: 3 requests in 60 s" in report.as_text([of(slow(3))], "test")
    assert "fine: queue (queue time p95: 0.01 s), prefill (prefill p95: 0.3 s)" in report.as_text([of(well())], "test")
    assert "queue (queue time p95: under 0.001 s)" in report.as_text([of(well(queue=spread(*[2e-5] * 100)))], "test")


def test_a_log_that_was_given_is_not_asked_for():
    (streaming,) = (one for one in of(well(), logged=True).unsure if one.area == "streaming")
    assert "no streamed answer" in streaming.why


# ---- pages of three releases


@pytest.mark.parametrize(
    ("release", "row"), [("0.10.2", "queue-bound"), ("0.20.2", "kv-bound"), ("0.32.0", "kv-bound")]
)
def test_the_captured_pages_of_each_release_are_read(release, row):
    """0.10.2: 8 of 12 wait for 4 places. 0.20.2 and 0.32.0: 24 blocks of cache."""
    (one,) = evidence(between([Pages("engine", *pair(release))], 30, "pages"))
    own = Settings(Overrides(thresholds={"ttft_p95": 0.5, "queue_time_p95": 0.5}))
    assert row == diagnose(one, own).findings[0].name


# ---- the command


def run(*arguments: str | Path) -> Result:
    # as into a pipe
    return CliRunner().invoke(doctor_command, [str(argument) for argument in arguments], env={"COLUMNS": None})


def unpacked(situation: str, folder: Path) -> list[str | Path]:
    """The arguments that read a recorded situation."""
    for when in ("before", "after"):
        (folder / f"{when}.prom").write_bytes(
            gzip.decompress((SITUATIONS / situation / f"{when}.prom.gz").read_bytes())
        )
    return ["--before", folder / "before.prom", "--after", folder / "after.prom", "--seconds", "24"]


def test_two_saved_pages_give_findings_and_exit_1(tmp_path):
    result = run(*unpacked("queue-bound", tmp_path))
    assert 1 == result.exit_code
    assert "1. queue-bound (queue; serious; confidence" in result.output
    assert re.search(r"first step +More places: `--max-num-seqs` one step up", result.output)
    assert "said of quality:" in result.output


def test_json_has_the_same_findings(tmp_path):
    """The JSON twin has the same findings with numbers and thresholds."""
    result = run(*unpacked("queue-bound", tmp_path), "--json")
    told = json.loads(result.output)
    assert (1, True, "queue-bound") == (result.exit_code, told["serious"], told["findings"][0]["finding"])
    (queue,) = (fact for fact in told["findings"][0]["evidence"] if fact["threshold"] == "queue_time_p95")
    assert ("seconds", 5.0) == (queue["unit"], queue["limit"])
    assert queue["value"] > 5


def test_an_engine_that_is_well_is_exit_0(tmp_path):
    result = run(*unpacked("none-healthy", tmp_path))
    assert (0, True) == (result.exit_code, "no finding" in result.output)


def test_thresholds_of_a_deployment_are_read_from_their_file(tmp_path):
    (own := tmp_path / "own.yaml").write_text("thresholds: {ttft_p95: 100, queue_time_p95: 100, queue_length: 1000}\n")
    assert 0 == run(*unpacked("queue-bound", tmp_path), "--thresholds", own).exit_code
    own.write_text("thresholds: {ttft_p59: 1}\n")
    result = run(*unpacked("queue-bound", tmp_path), "--thresholds", own)
    assert 2 == result.exit_code
    assert re.search(r"thresholds\.ttft_p59.* thresholds\.ttft_p95", result.output)


def test_a_request_log_adds_what_clients_saw(tmp_path):
    log = SITUATIONS / "client-disconnects" / "requests.jsonl.gz"
    told = json.loads(run(*unpacked("client-disconnects", tmp_path), "--log", log, "--json").output)
    share, count = told["findings"][0]["evidence"]
    assert ("client-disconnects", "hangup_ratio", 90) == (
        told["findings"][0]["finding"],
        share["threshold"],
        count["value"],
    )
    assert pytest.approx(90 / 140) == share["value"]


def test_commands_repeat_what_was_given(tmp_path):
    log = tmp_path / "re quests.jsonl.gz"
    log.write_bytes((SITUATIONS / "client-disconnects" / "requests.jsonl.gz").read_bytes())
    told = run(*unpacked("client-disconnects", tmp_path), "--log", log).output
    assert "vllm-watch doctor --before BEFORE --after AFTER --seconds 24" in told
    kept = run(*unpacked("queue-bound", tmp_path), "--log", log).output
    assert f"vllm-watch compare --log '{log}' --event queue-bound" in kept


def test_a_page_that_is_no_gateways_is_told(tmp_path, engine):
    arguments = unpacked("kv-bound", tmp_path)
    result = run(*arguments, "--gateway-before", arguments[1], "--gateway-after", arguments[3])
    assert (2, True) == (result.exit_code, f"{arguments[3]} shows no series" in result.output)
    assert "metrics_listen (127.0.0.1:8010" in result.output
    live = run(engine, "--gateway", engine, "--for", "9s")
    assert 2 == live.exit_code
    assert re.search(rf"{engine} .*no series .*metrics_listen", live.output)
    assert "looking" not in live.output, "it is told before the wait"


def test_gateway_pages_correct_an_idle_engine(tmp_path):
    """Pages of the gateway tell of an engine that looks idle and is not."""
    engine_pages = unpacked("none-idle", tmp_path)
    alone = run(*engine_pages)
    assert 0 == alone.exit_code
    assert re.search(r"said of API: .*--gateway", alone.output)
    (page := tmp_path / "gateway.prom").write_text(
        'vllm_watch_gateway_running_requests{team="a",band="b"}'
        ' 9\nvllm_watch_gateway_upstream_up{upstream="x",address="x:8000"} 1\n'
    )
    told = run(*engine_pages, "--gateway-before", page, "--gateway-after", page)
    assert (1, True) == (told.exit_code, "1. frozen-engine" in told.output)
    assert "there, at least: 9\n" in told.output


def test_help_lists_the_names_of_workloads():
    assert all(one.name in re.sub(r"\s+", "", run("--help").output) for one in advice.WORKLOADS)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["http://127.0.0.1:1", "--prometheus", "http://127.0.0.1:2"],
        ["--before", "{page}"],
        ["--before", "{page}", "--after", "{page}"],
        ["--seconds", "3"],
        ["--prometheus", "http://127.0.0.1:1", "--gateway", "http://127.0.0.1:2"],
        ["--workload", "rag", "--goal", "ttft"],
        ["--goal", "fame"],
        ["--workload", "rga"],
        ["--prometheus", "nowhere"],
        ["127.0.0.1:8000"],
        ["http://127.0.0.1:9", "--for", "0s"],
        ["--prometheus", "http://127.0.0.1:9", "--window", "0s"],
        ["--before", "{page}", "--after", "{page}", "--seconds", "nan"],
        ["--before", "{page}", "--after", "{page}", "--seconds", "3", "--gateway-before", "{page}"],
    ],
    ids=" ".join,
)
def test_wrong_use_is_exit_2_with_a_sentence(arguments, tmp_path):
    (page := tmp_path / "page.prom").write_text("vllm:num_requests_running 0\n")
    result = run(*(argument.format(page=page) for argument in arguments))
    assert 2 == result.exit_code
    assert re.search(r"Error: \S+ ", result.output)
    assert "Traceback" not in result.output


def test_a_page_that_is_none_is_named(tmp_path):
    (good := tmp_path / "good.prom").write_text("vllm:num_requests_running 0\n")
    (bad := tmp_path / "bad.prom").write_text("<html>502 Bad Gateway</html>\n")
    result = run("--before", good, "--after", bad, "--seconds", "30")
    assert (2, True) == (result.exit_code, f"{bad}: " in result.output)
    assert "line 1 is '<html>" in result.output


def test_pages_in_the_wrong_order_and_one_page_twice_are_told(tmp_path):
    _, before, _, after, *rest = unpacked("kv-bound", tmp_path)
    for first, second, fact in ((after, before, f"later than {before}"), (after, after, f"{after} are the same")):
        result = run("--before", first, "--after", second, *rest)
        assert (2, True) == (result.exit_code, fact in result.output)


def test_a_log_of_another_time_is_told(tmp_path):
    result = run(*unpacked("kv-bound", tmp_path), "--log", SITUATIONS / "rejections-2" / "requests.jsonl.gz")
    assert re.search(r"note: .* same time\? .*\b80 .* 30$", result.output, re.MULTILINE)


def test_foreign_page_and_absent_engine_are_reported(tmp_path):
    """A page of something else and an engine that is away are told."""
    (page := tmp_path / "page.prom").write_text("up 1\n")
    result = run("--before", page, "--after", page, "--seconds", "30")
    assert (2, True) == (result.exit_code, "no engine in" in result.output)
    away = run("http://127.0.0.1:9", "--for", "1s")
    assert (2, True) == (away.exit_code, "does not answer" in away.output)
    gone = run("--prometheus", "http://127.0.0.1:9")
    assert (2, True) == (gone.exit_code, "does not answer" in gone.output)


@pytest.fixture
def engine() -> Iterator[str]:
    """An address that shows the pages of a recorded situation, one after the other; its third look fails."""
    texts = [
        gzip.decompress((SITUATIONS / "kv-bound" / f"{when}.prom.gz").read_bytes()) for when in ("before", "after")
    ]
    looks = itertools.count()

    class Shows(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            look = next(looks) if self.path == "/metrics" else -1
            body = b'{"version":"0.32.0"}' if look < 0 else texts[min(look, 1)]
            self.send_response(503 if look == 2 else 200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Shows)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_running_engine_is_looked_at_twice(engine, monkeypatch):
    """A short time says little of latency, and preemptions by the dozen all the same."""
    without_waiting(monkeypatch)
    result = run(engine, f"{engine}/", "--for", "5s")
    assert 1 == result.exit_code
    assert "1. kv-bound (queue" in result.output, "an address that is given twice is one engine"
    assert f"vllm-watch doctor {engine} --for 5s" in result.output
    assert f"looking for 5 s at {engine}" in result.stderr


@pytest.mark.prometheus
def test_a_prometheus_is_asked_for_its_window_and_model(past, tmp_path):
    import time

    (file := tmp_path / "page.om").write_text(scraped(*pair("0.20.2"), 600, int(time.time())))
    where = past(file)
    own = tmp_path / "own.yaml"
    own.write_text("thresholds: {preemptions_per_second: 0.05}\n")
    result = run("--prometheus", where, "--window", "11m", "--model", "tiny", "--thresholds", own, "--json")
    told = json.loads(result.output)
    assert (1, "kv-bound", ["tiny"]) == (
        result.exit_code,
        told["findings"][0]["finding"],
        [one["model"] for one in told["models"]],
    )
    assert f"vllm-watch doctor --prometheus {where} --window 11m --model tiny" == told["first_step"]["commands"][-1]
    nobody = run("--prometheus", where, "--window", "11m", "--model", "nobody")
    assert (2, True) == (nobody.exit_code, "the model nobody" in nobody.output)


def test_tables_and_goals_answer_before_traffic():
    """Before there is traffic both tables and the goals answer."""
    ralph = run("--workload", "ralph")
    assert 0 == ralph.exit_code
    assert "70 to 95 %" in ralph.output
    assert "bench run agent-loop" in ralph.output
    assert "disaggregated prefill" in run("--goal", "ttft").output.split("after that")[1]
    assert 1 == ralph.output.count("first step"), "the scenario of a workload has no other"
    assert 2 == run("--workload", "chat").output.count("first step"), "two things that chat may mean"
    told = json.loads(run("--workload", "rag", "--json").output)
    assert [0.0, 0.15] == told["scenarios"][0]["expected_hit"]


def test_the_examples_of_the_page_are_options_that_there_are():
    known = {option for parameter in doctor_command.params for option in parameter.opts}
    text = (Path(__file__).parents[3] / "docs/guides/doctor.md").read_text()
    lines = [line for line in text.splitlines() if "vllm-watch doctor" in line]
    assert lines
    assert set() == {option for line in lines for option in re.findall(r"(?<![\w-])--[a-z-]+", line)} - known


def test_a_terminal_of_80_columns_breaks_no_sentence_at_its_edge():
    """Commands and files stay whole, so that they can be copied."""
    text = report.as_text([of(well(preemptions=60, hits=100, prefill=spread(*[1.0] * 100)))], "test")
    told = report.folded(text, 80)
    assert [] == [line for line in told.splitlines() if len(line) > 80 and not line.startswith("     ")]
    assert text.split() == told.split()
    whole = [line for line in text.splitlines() if line.startswith("     ")]
    assert whole
    assert set(whole) <= set(told.splitlines())
    assert text == report.folded(text, 0)


def test_serious_is_what_the_exit_status_says():
    assert serious(ranked([of(well(preemptions=60))]))
    assert not serious(ranked([of(well(hits=100, prefill=spread(*[1.0] * 100)))]))
