"""What the doctor's figures are made of: two pages and a Prometheus tell the same, restarts and renames change
nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.catalogue import exposition_parser, gateway, promql_ast, sidecar, vllm
from exporters.catalogue.exposition_parser import Exposition
from exporters.catalogue.metric import EngineRole
from exporters.net.prometheus import Prometheus, QueryResult, address
from exporters.requests.record import RequestRecord
from stack.doctor.collect import evidence
from stack.doctor.evidence import EngineSnapshot, Gauge, ModelEvidence, Spread
from stack.doctor.series import Pages, SeriesWindow, between, gauges_of, over
from stack.doctor.symptoms import ROWS
from tests.support import engine_pair
from tests.support.doctor_pages import PAIRS, golden, pair, scraped

each_release = pytest.mark.parametrize("release", PAIRS)
SECONDS = 60


def one(before: Exposition, after: Exposition, seconds: float = SECONDS) -> ModelEvidence:
    (found,) = evidence(between([Pages("engine:8000", before, after)], seconds, "two pages"))
    return found


def changed(given: Exposition, values: Mapping[str, float]) -> Exposition:
    """The page with other values of these samples."""
    return Exposition(
        {name: [(labels, values.get(name, value)) for labels, value in rows] for name, rows in given.samples.items()},
        given.kinds,
    )


# ---- prefill and decode on separate engines


def of_pair(**roles: str) -> ModelEvidence:
    """The pages of a real pair, with these roles."""
    pages = [Pages(str(role), engine_pair.page(role, "before"), engine_pair.page(role, "after")) for role in EngineRole]
    (found,) = evidence(replace(between(pages, SECONDS, "two pages of each"), roles=roles))
    return found


def test_a_request_of_a_pair_is_one_request():
    """8 joint requests; without roles the doctor sees 16, and a queue that is a KV transfer."""
    with_roles, without = of_pair(prefill="prefill", decode="decode"), of_pair()
    assert (8, 16) == (with_roles.whole.ended, without.whole.ended)
    assert (32_000, 64_000) == (with_roles.whole.prompt_tokens, without.whole.prompt_tokens)
    assert with_roles.whole.queue
    assert without.whole.queue
    assert with_roles.whole.queue.mean < 0.001 < 0.05 < without.whole.queue.mean


def test_each_engine_of_a_pair_shows_its_own():
    engines = of_pair(prefill="prefill", decode="decode").engines
    assert [8, 8] == [engines[role].ended for role in EngineRole]
    assert engines["prefill"].queue
    assert engines["decode"].queue is None, "it contains the transfer"


# ---- two pages


def test_counters_grow_and_gauges_have_two_values():
    """A counter is what it grew by and a gauge what it was at both."""
    figures = one(*pair("0.32.0")).whole
    assert (24, 24, 7) == (figures.begun, figures.ended, figures.preemptions)
    assert {"max_num_queued_reqs": 126, "max_num_queued_tokens": 0} == figures.rejections
    assert 24 == figures.finished["length"]
    assert pytest.approx(1056 / 2970) == figures.hit_ratio
    assert (Gauge(0, 0, 0), True) == (figures.running, figures.caching)


def test_looks_between_pages_count_for_gauges():
    """Whoever runs while nobody waits says nothing of how many may."""
    page_ = golden("0.32.0-preempt-after-load")

    def look(running: float, waiting: float) -> Exposition:
        return changed(page_, {vllm.NUM_REQUESTS_RUNNING.name: running, vllm.NUM_REQUESTS_WAITING.name: waiting})

    inside = [gauges_of(look(*each)) for each in ((16, 28), (15, 20), (16, 24))]
    figures = evidence(between([Pages("e", look(0, 0), look(3, 0), inside)], SECONDS, ""))[0].whole
    assert (Gauge(0, 10, 16), Gauge(15, 47 / 3, 16, looks=3)) == (figures.running, figures.crowded)


WORKS = {vllm.NUM_REQUESTS_RUNNING.name: 4.0}


@pytest.mark.parametrize(
    ("tokens", "still_s"),
    [
        ((10, 20, 30, 30, 30), 20.0),
        ((10, 20, 30, 40, 50), 0.0),
        ((10, 10, 10, 10, 10), 40.0),
        ((10, 30), None),
        ((10, 10), 40.0),
    ],
    ids=str,
)
def test_progress_at_the_looks_tells_when_an_engine_stopped(tokens, still_s):
    """Two pages that differ do not tell it."""
    page_ = golden("0.32.0-preempt-after-load")
    looks = [changed(page_, {**WORKS, vllm.GENERATION_TOKENS.name: made}) for made in tokens]
    pages = Pages("e", looks[0], looks[-1], [gauges_of(each) for each in looks[1:-1]])
    assert still_s == evidence(between([pages], 40, ""))[0].whole.still_s


def test_prefilling_or_idle_engine_is_not_stalled():
    """An engine that prefills or has no work does not stand still."""
    page_ = golden("0.32.0-preempt-after-load")
    chunks = [changed(page_, {**WORKS, vllm.KV_CACHE_USAGE.name: used}) for used in (0.1, 0.2, 0.3)]
    idle = [changed(page_, {vllm.NUM_REQUESTS_RUNNING.name: 0.0})] * 3
    for looks in (chunks, idle):
        assert 0 == evidence(between([Pages("e", looks[0], looks[-1], looks[1:-1])], 40, ""))[0].whole.still_s


@pytest.mark.parametrize(("running", "still_s"), [(0.0, 0.0), (1.0, 40.0)])
def test_decode_engine_that_only_fetches_is_not_stalled(running, still_s):
    gauges = {vllm.NUM_REQUESTS_RUNNING.name: running, vllm.NUM_REQUESTS_WAITING.name: 1.0}
    page_ = changed(golden("0.32.0-preempt-after-load"), gauges)
    labels = page_.of(vllm.NUM_REQUESTS_RUNNING.name)[0][0]
    fetch = {vllm.NUM_REQUESTS_KV_FETCH_BY_STAGE.name: [({**labels, "stage": "in_progress"}, 1.0)]}
    looks = [Exposition({**page_.samples, **fetch}, page_.kinds)] * 3
    assert still_s == evidence(between([Pages("e", looks[0], looks[-1], looks[1:-1])], 40, ""))[0].whole.still_s


@pytest.mark.prometheus
def test_prometheus_shows_a_stop_in_the_window(past, tmp_path):
    """A Prometheus tells that an engine stopped within the window."""
    ends_s, labels = 1_750_000_000, 'model_name="m",engine="0",instance="e"'
    lines = [
        f"{name}{{{labels}}} {at if moves and at < 700 else 700 if moves else 4} {ends_s - 900 + at}"
        for name, moves in ((vllm.NUM_REQUESTS_RUNNING.name, False), (vllm.NUM_REQUESTS_WAITING.name, False),
                            (vllm.GENERATION_TOKENS.name, True), (vllm.PROMPT_TOKENS.name, True))
        for at in range(0, 901, 15)
    ]  # fmt: skip
    (file := tmp_path / "page.om").write_text("\n".join([*lines, "# EOF", ""]))

    async def asked(at_s: float) -> float | None:
        async with Prometheus(address(past(file))) as prometheus:
            return evidence(await over(prometheus, 600, at_s))[0].whole.still_s

    assert (0, 180) == (asyncio.run(asked(ends_s - 300)), asyncio.run(asked(ends_s)))


@pytest.mark.parametrize(
    ("shown", "state"),
    [
        ("gateway:slow:kv_fetch sidecar:idle:no_work", ("slow", "kv_fetch")),
        ("gateway:idle:no_work sidecar:hung:steps_stopped", ("hung", "steps_stopped")),
        ("sidecar:healthy:steps", ("healthy", "steps")),
        ("", None),
    ],
)
def test_state_of_an_engine_is_read_from_its_observers(shown, state):
    metric = {"gateway": gateway.ENGINE_STATE.name, "sidecar": sidecar.ENGINE_STATE.name}
    sources = [Pages("e:1", *pair("0.32.0"))]
    for one_shown in shown.split():
        observer, its_state, why = one_shown.split(":")
        labels = f'{{upstream="a",address="e:1",state="{its_state}",evidence="{why}"}}'
        page_ = exposition_parser.parse(f"{metric[observer]}{labels} 1\n")
        sources.append(Pages(observer, page_, page_))
    figures = evidence(between(sources, SECONDS, ""))[0].whole
    assert ({"e:1": state} if state else {}) == figures.states


def test_gateway_running_count_needs_all_its_engines():
    """What a gateway runs is at the engines that were looked at only where it has no other."""

    def gateway_of(*addresses: str) -> Exposition:
        ups = "".join(f'vllm_watch_gateway_upstream_up{{upstream="{each}",address="{each}"}} 1\n' for each in addresses)
        return exposition_parser.parse(f'vllm_watch_gateway_running_requests{{team="a",band="b"}} 2\n{ups}')

    def only(*addresses: str) -> bool | None:
        pages = [Pages("e:1", *pair("0.32.0")), Pages("g:1", gateway_of(*addresses), gateway_of(*addresses))]
        gate = evidence(between(pages, SECONDS, ""))[0].gateway
        return gate and gate.only

    assert (True, False) == (only("e:1"), only("e:1", "f:1"))


def test_restart_between_pages_is_reported():
    """A restart between the pages is told and its values count from there."""
    before, after = pair("0.32.0")
    started = {vllm.PROCESS_START_TIME.name: (before.total(vllm.PROCESS_START_TIME.name) or 0) + 1000}
    found = one(before, changed(after, started))
    assert 116 == found.whole.ended
    assert any("engine:8000 started anew" in note for note in found.notes)


def test_a_restart_is_seen_where_the_page_tells_no_start():
    """With several API servers there is no start time; then a total that fell says it."""
    before, after = (
        Exposition({n: rows for n, rows in each.samples.items() if not n.startswith("process_")}, each.kinds)
        for each in pair("0.32.0")
    )
    assert 92 == one(after, before).whole.ended
    assert one(after, before).notes
    assert not one(before, after).notes


def test_the_older_names_of_0_10_give_the_same_figures():
    """0.10.2 shows old and new side by side; 0.10.0 had the old ones alone."""
    newer = [
        metric.name
        for metric in (vllm.KV_CACHE_USAGE, vllm.PREFIX_CACHE_HITS, vllm.PREFIX_CACHE_QUERIES, vllm.INTER_TOKEN_LATENCY)
    ]
    old = [
        Exposition({n: rows for n, rows in each.samples.items() if not n.startswith(tuple(newer))}, each.kinds)
        for each in pair("0.10.2")
    ]
    assert one(*pair("0.10.2")).whole == one(*old).whole


@each_release
def test_every_figure_that_a_release_can_tell_is_told(release):
    figures = one(*pair(release)).whole
    missing = {field.name for field in fields(EngineSnapshot) if getattr(figures, field.name) in (None, {})}
    allowed = {"drafts", "drafted", "accepted", "crowded", "silent_s", "states"} | (
        {"rejections", "deferred"} if release == "0.10.2" else {"rejections"} if release == "0.20.2" else set()
    )
    assert missing <= allowed | ({"per_token"} if release == "0.10.2" else set())


def test_cores_of_a_model_are_summed():
    """Cores of one model are summed and each is an engine of its own."""
    before, after = pair("0.32.0")

    def two(given: Exposition) -> Exposition:
        rows = {
            n: [*its, *(({**labels, "engine": "1"}, value) for labels, value in its if "engine" in labels)]
            for n, its in given.samples.items()
        }
        return Exposition(rows, given.kinds)

    found = one(two(before), two(after))
    assert 48 == found.whole.ended
    assert {"engine:8000 engine 0": 24, "engine:8000 engine 1": 24} == {
        name: figures.ended for name, figures in found.engines.items()
    }
    assert {"max_num_queued_reqs": 126, "max_num_queued_tokens": 0} == found.whole.rejections, (
        "the API server refuses, for both"
    )


def test_models_are_told_apart_and_one_of_them_can_be_asked_for():
    before, after = pair("0.32.0")

    def renamed(given: Exposition) -> Exposition:
        return Exposition(
            {n: [({**labels, "model_name": "other"}, v) for labels, v in rows] for n, rows in given.samples.items()},
            given.kinds,
        )

    series = between([Pages("a:1", before, after), Pages("b:1", renamed(before), renamed(after))], SECONDS, "pages")
    assert ["other", "tiny"] == [each.model for each in evidence(series)]
    assert ["tiny"] == [each.model for each in evidence(series, model="tiny")]
    with pytest.raises(ValueError, match="the model nobody"):
        evidence(series, model="nobody")


def test_one_model_of_two_does_not_get_the_log_of_the_other():
    before, after = pair("0.32.0")

    def renamed(given: Exposition) -> Exposition:
        return Exposition(
            {n: [({**labels, "model_name": "other"}, v) for labels, v in rows] for n, rows in given.samples.items()},
            given.kinds,
        )

    series = between([Pages("a:1", before, after), Pages("b:1", renamed(before), renamed(after))], SECONDS, "pages")
    records = [
        record(outcome="ok", model="tiny"),
        *(record(outcome="upstream_error", model="other") for _ in range(20)),
    ]
    (tiny,) = evidence(series, records, model="tiny")
    assert tiny.clients is not None
    assert {"ok": 1} == tiny.clients.outcomes


@pytest.mark.parametrize(("seconds", "wrong"), [(SECONDS, False), (SECONDS / 100, True), (SECONDS * 100, True)])
def test_a_time_that_cannot_be_is_told(seconds, wrong):
    before, after = pair("0.32.0")
    busy = {vllm.NUM_REQUESTS_RUNNING.name: 4.0, f"{vllm.INTER_TOKEN_LATENCY.name}_sum": 240.0}
    was = changed(before, {**busy, f"{vllm.INTER_TOKEN_LATENCY.name}_sum": 0.0})
    assert wrong == any(" s right?" in note for note in one(was, changed(after, busy), seconds).notes)


def test_pages_that_cannot_be_two_looks_are_refused():
    before, after = (
        changed(each, {vllm.PROCESS_CPU.name: cpu}) for each, cpu in zip(pair("0.32.0"), (10.0, 11.0), strict=True)
    )
    before = changed(before, {vllm.PROCESS_START_TIME.name: after.total(vllm.PROCESS_START_TIME.name) or 0})
    assert Pages("e", before, after).checked()
    with pytest.raises(ValueError, match="pages of e "):
        Pages("e", after, after).checked()
    with pytest.raises(ValueError, match="later than e;"):
        Pages("e", after, before).checked()


def test_a_page_without_an_engine_is_refused_with_a_way_out():
    empty = exposition_parser.parse("up 1\n")
    with pytest.raises(ValueError, match="vllm-watch metrics check"):
        one(empty, empty)


# ---- the log


def record(**given: object) -> RequestRecord:
    return RequestRecord(request_id="x", **given)  # type: ignore[arg-type]


def test_log_tells_who_left_and_was_rejected():
    """A log says who left who was refused and how fast answers came."""
    records = [
        *(record(outcome="ok", team="a", model="tiny", ttft_ms=100.0, tpot_ms=10.0, queue_ms=5.0) for _ in range(3)),
        record(outcome="client_abort", reason="client_hangup", team="b", ttft_ms=9000.0),
        record(outcome="rejected", reason="team_limit", team="b"),
    ]
    (found,) = evidence(between([Pages("e", *pair("0.32.0"))], SECONDS, "pages"), records)
    clients = found.clients
    assert clients is not None
    assert {"ok": 3, "client_abort": 1, "rejected": 1} == clients.outcomes
    assert ({"a": 3, "b": 2}, {"b": 1}) == (clients.teams, clients.refused)
    assert clients.ttft is not None
    assert (3, pytest.approx(0.1)) == (clients.ttft.count, clients.ttft.at(95)), (
        "a wait that was given up is no time to first token"
    )


def test_an_empty_log_is_told_and_taken_for_nothing():
    (found,) = evidence(between([Pages("e", *pair("0.32.0"))], SECONDS, "pages"), [])
    assert found.clients is None
    assert any("no record" in note for note in found.notes)


# ---- distributions


BOUNDS = (0.1, 0.2, 0.5, 1.0, 2.0, float("inf"))


def bucketed(values: list[float]) -> Spread:
    return Spread(
        len(values), sum(values), tuple((bound, float(sum(value <= bound for value in values))) for bound in BOUNDS)
    )


@given(st.lists(st.floats(0.001, 1.9), min_size=1, max_size=60), st.sampled_from((50, 95, 99)))
def test_percentile_lies_in_its_bucket(values, percent):
    """As exact as the buckets are, and never beyond: rank as PromQL counts it."""
    exact = sorted(values)[max(0, -(-percent * len(values) // 100) - 1)]
    upper = next(bound for bound in BOUNDS if exact <= bound)
    lower = max((bound for bound in BOUNDS if bound < exact), default=0.0)
    assert lower <= bucketed(values).at_most(percent) <= upper
    assert bucketed(values).at(percent) <= upper


@given(st.lists(st.floats(0.001, 1.9), min_size=1, max_size=60), st.floats(0, 3), st.floats(0, 3))
def test_share_above_a_limit_falls_with_it(values, one_limit, other):
    """The share above a limit falls with the limit and lies between 0 and 1."""
    spread, low, high = bucketed(values), min(one_limit, other), max(one_limit, other)
    assert 0 <= spread.above(high) <= spread.above(low) + 1e-9 <= 1 + 2e-9


def test_below_the_first_bound_the_mean_stands_in_for_a_guess():
    """A page of fast requests would read 0.285 s, 95 % of a bound that nothing came near to."""
    spread = Spread(100, 2.0, ((0.3, 100.0), (float("inf"), 100.0)))
    assert pytest.approx(0.02) == spread.at(95)
    assert 0.3 == spread.at_most(95)


# ---- a real Prometheus


@pytest.mark.prometheus
@each_release
def test_a_prometheus_gives_the_same_figures_as_the_two_pages(release, past, tmp_path):
    before, after = pair(release)
    ends_s = 1_750_000_000
    (file := tmp_path / "page.om").write_text(scraped(before, after, SECONDS, ends_s))

    async def asked() -> SeriesWindow:
        async with Prometheus(address(past(file))) as prometheus:
            return await over(prometheus, SECONDS + 1, ends_s)  # a window leaves out the sample at its very beginning

    recorded = asyncio.run(asked())
    (theirs,), ours = evidence(recorded), one(before, after)
    assert (ours.model, ours.whole.caching) == (theirs.model, theirs.whole.caching)
    for field in fields(EngineSnapshot):
        mine, its = getattr(ours.whole, field.name), getattr(theirs.whole, field.name)
        match mine:
            case Spread():
                assert its is not None, field.name
                assert pytest.approx((mine.count, mine.mean, mine.at(95)), rel=0.05) == (
                    its.count,
                    its.mean,
                    its.at(95),
                ), field.name
            case Gauge():
                assert pytest.approx((mine.lowest, mine.highest)) == (its.lowest, its.highest), field.name
            case dict():
                assert pytest.approx({k: v for k, v in mine.items() if v}, rel=0.05) == {
                    k: v for k, v in its.items() if v
                }, field.name
            case bool() | None:
                assert mine == its, field.name
            case _:
                assert pytest.approx(mine, rel=0.05) == its, field.name


@pytest.mark.prometheus
def test_young_prometheus_reports_its_range(past, tmp_path):
    """A Prometheus younger than the window says how much it recorded."""
    ends_s = 1_750_000_000
    (file := tmp_path / "page.om").write_text(scraped(*pair("0.32.0"), 120, ends_s))

    async def asked() -> SeriesWindow:
        async with Prometheus(address(past(file))) as prometheus:
            return await over(prometheus, 900, ends_s)

    found = asyncio.run(asked())
    assert pytest.approx(120, abs=10) == found.seconds
    assert re.search(r"last 15m, .* 1[12]\d s$", found.source)


@pytest.mark.prometheus
def test_what_runs_beside_a_queue_is_told_by_a_prometheus_too(past, tmp_path):
    """Calm minutes before the crowd say nothing of how many may run."""
    ends_s, labels = 1_750_000_000, 'model_name="m",engine="0",instance="e"'
    lines = [
        f"{metric.name}{{{labels}}} {crowd if at > 600 else calm} {ends_s - 900 + at}"
        for metric, calm, crowd in ((vllm.NUM_REQUESTS_RUNNING, 1, 16), (vllm.NUM_REQUESTS_WAITING, 0, 28))
        for at in range(0, 901, 15)
    ]
    (file := tmp_path / "page.om").write_text("\n".join([*lines, "# EOF", ""]))

    async def asked() -> SeriesWindow:
        async with Prometheus(address(past(file))) as prometheus:
            return await over(prometheus, 899, ends_s)

    assert Gauge(16, 16, 16) == evidence(asyncio.run(asked()))[0].whole.crowded


@pytest.mark.prometheus
def test_matrix_queries_parse_and_busy_ones_answer(past, tmp_path):
    """Every query of the matrix is understood and those about a busy engine answer."""
    ends_s = 1_750_000_000
    (file := tmp_path / "page.om").write_text(scraped(*pair("0.32.0"), 600, ends_s))

    async def asked() -> dict[str, QueryResult]:
        async with Prometheus(address(past(file))) as prometheus:
            return {ask: await prometheus.as_of(ask, ends_s) for row in ROWS for ask in row.asks}

    answers = asyncio.run(asked())
    assert {} == {ask: answer.error for ask, answer in answers.items() if answer.error}
    of_vllm = [ask for ask in answers if all(name.startswith("vllm:") for name in promql_ast.names(ask))]
    silent = {ask for ask in of_vllm if not answers[ask].series}
    assert {"frozen-engine", "speculative-decoding", "decode-drafted"} == {
        row.name for row in ROWS if silent & set(row.asks)
    }, "it moves, and drafts nothing"
    assert len(of_vllm) > 3 * len(silent)


def test_no_query_asks_of_another_model():
    """No query asks of other models than the one that is meant."""
    from stack.doctor.series import questions

    asked = [question.expr for question in questions(60, 'a"b') if "model_name" in question.expr]
    assert asked
    assert all(
        re.search(r'model_name="a\\"b"', expr)
        for expr in asked
        if "cache_config" not in expr and "num_requests_running" not in expr
    )
