"""What a fleet costs in series: each figure of the budget against a page, each cap against a log that tries to break
it."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest

from exporters.catalogue import attributed, gateway, gpu, vllm
from exporters.exposition import Distribution, render
from exporters.gpu.readings import GpuReading
from exporters.gpu.series import SAMPLES, families
from exporters.requests.bounded_names import OTHER, BoundedNames
from exporters.requests.counters import FINISH_REASONS, RequestCounters
from exporters.requests.grouped_latency import PAIRS, GroupedLatency
from exporters.requests.record import UNKNOWN_TEAM, UNREADABLE, Outcome, RequestRecord
from exporters.sidecar import Sidecar
from exporters.sidecar_config import EngineTarget, SidecarConfig
from exporters.tracing.config import OtlpConfig
from stack.deploy.fleet import budget, files
from stack.deploy.fleet.budget import Fleet
from stack.gateway.metrics import GatewayMetrics
from stack.gateway.reasons import REASONS
from stack.gateway.routes import RECORDED
from tests.support.wait import until

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parents[2] / "golden"
PAGES = {path.stem: path.read_text() for path in GOLDEN.glob("*.prom")}


def samples(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def series_of(traffic: RequestCounters) -> int:
    """As Prometheus counts them: a histogram has a series for each bound, +Inf, sum and count, and a native one."""
    return sum(len(value.bounds) + 4 if isinstance(value, Distribution) else 1 for _, _, value in traffic.samples())


# ---- figures against pages


@pytest.mark.parametrize("release", budget.ENGINE)
def test_engine_page_is_the_fullest_captured(release):
    """An engine's page is the fullest that was captured of its release."""
    of_release = [samples(text) for name, text in PAGES.items() if name.startswith(f"{release}.")]
    fullest = max(of_release, key=len)
    assert budget.EnginePage(len(fullest), sum('engine="' in line for line in fullest)) == budget.ENGINE[release]


@pytest.mark.parametrize("name", PAGES)
def test_captured_pages_are_within_fleet_limits(name):
    """Every captured page is within every limit of the fleets configuration."""
    job = next(
        job
        for job in yaml.safe_load((ROOT / files.FOLDER / "prometheus.yml").read_text())["scrape_configs"]
        if job["job_name"] == "vllm"
    )
    lines = samples(PAGES[name])
    labels = [re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', line) for line in lines]
    assert len(lines) < job["sample_limit"]
    assert len(PAGES[name]) < files.BYTES_PER_SAMPLE * len(lines)
    assert max(map(len, labels)) + 10 < job["label_limit"], "and labels of the place"
    assert max(len(value) for pairs in labels for _, value in pairs) < job["label_value_length_limit"]


@pytest.mark.parametrize(
    "config", sorted((ROOT / "stack/deploy").rglob("prometheus*.yml")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_limit_is_twice_what_a_page_is_expected_to_hold(config):
    jobs = {job["job_name"]: job for job in yaml.safe_load(config.read_text())["scrape_configs"]}
    assert {"vllm", "sidecar"} <= jobs.keys()
    for name, most in budget.PAGES.items():
        if name not in jobs:  # compose.watch.yml has no gateway
            continue
        assert 2 * most <= jobs[name]["sample_limit"] < 2 * most + 500


def worst(team: str, model: str) -> list[RequestRecord]:
    """Records of one team and model that meet everything the log can say, and 60 reasons that no gateway of ours
    gives."""
    ends = [
        (outcome, f"why-{n}", sorted(FINISH_REASONS)[n % len(FINISH_REASONS)])
        for n, outcome in enumerate(get_args(Outcome) * 12)
    ]
    full = dict.fromkeys(("tpot_ms", "e2e_ms", "queue_ms", "engine_queue_ms", "engine_ttft_ms"), 12.0) | {
        "ttft_ms": 30.0
    }
    first = RequestRecord(
        request_id="r", team=team, model=model, outcome="ok", status=200, finish_reason="stop", stream=True,
        prompt_tokens=9, cached_tokens=1,
        completion_tokens=9, cache_hit=True, **full,
    )  # fmt: skip
    missed = RequestRecord(
        request_id="m", team=team, model=model, outcome="ok", finish_reason="odd", prompt_tokens=1, cache_hit=False
    )
    untold = RequestRecord(request_id="u", team=team, model=model)
    unpaid = RequestRecord(
        request_id="e", team=team, model=model, outcome="client_abort", est_prompt_tokens=9, est_completion_tokens=9
    )
    return [
        first,
        missed,
        untold,
        unpaid,
        *(
            RequestRecord(
                request_id=f"r{n}",
                team=team,
                model=model,
                outcome=o,
                reason=why,
                finish_reason=f,
                unreadable=(*UNREADABLE, "odd")[n % (len(UNREADABLE) + 1)],
            )
            for n, (o, why, f) in enumerate(ends)
        ),
    ]


def test_team_and_model_cost_as_the_catalogue_says():
    """What GPUs are shared by is not in the log: those families are the difference."""
    traffic = RequestCounters(BoundedNames(), BoundedNames())
    for record in worst("a", "m"):
        traffic.add(record)
    of_cards = sum(budget.series(m) for m in attributed.ATTRIBUTED if "team" in m.labels)
    table = 3  # how full the tables are
    assert budget.SIDECAR_TEAM_AND_MODEL - of_cards == series_of(traffic) - table


def test_native_histograms_alone_save_the_ladders():
    traffic = RequestCounters(BoundedNames(), BoundedNames())
    for record in worst("a", "m"):
        traffic.add(record)
    ladders = sum(len(value.bounds) + 3 for _, _, value in traffic.samples() if isinstance(value, Distribution))
    assert ladders == budget.SIDECAR_TEAM_AND_MODEL - budget.SIDECAR_TEAM_AND_MODEL_NATIVE


def test_gateway_team_costs_within_the_budget():
    """The gateway costs no more for a team than the budget says."""
    shown = GatewayMetrics()
    reasons = [name for name, one in REASONS.items() if one.outcome == "rejected"]
    assert len(reasons) <= budget.series(gateway.REJECTED)
    for outcome, status in product(get_args(Outcome), (200, 404, 503, None)):
        for reason in reasons if outcome == "rejected" else ("x",):
            shown.began("a")
            shown.ended("a", outcome, status, reason)
    of_team = [line for line in samples(_page(shown)) if 'team="a"' in line]
    standing = 3  # waiting, running and the estimate, of admission
    assert len(of_team) + standing <= budget.CREATED * budget.GATEWAY_TEAM
    assert len(samples(_page(GatewayMetrics()))) <= budget.GATEWAY_FIXED
    assert len(UNREADABLE) * len(RECORDED) <= budget.series(gateway.UNREADABLE)


def _page(shown: GatewayMetrics) -> str:
    return generate_latest(shown.registry).decode()


def test_a_card_that_tells_everything_costs_what_the_budget_says():
    """The reader's own code with every value there; what is absent has a reason instead of a value."""
    values = {name: 1.0 for _, _, name in SAMPLES}
    card = GpuReading(
        "GPU-1",
        **values,
        energy_joules=1.0,
        event_reasons=0,
        xids={},
        absent={f"value_{n}": f"why-{n}" for n in range(8)},
    )
    counted = Counter(metric for metric, _, _ in families([card]))
    assert {metric: budget.series(metric) for metric in gpu.GPU if metric not in gpu.MIG} == counted
    of_teams = sum(budget.series(m) for m in attributed.ATTRIBUTED if "uuid" in m.labels)
    assert budget.SIDECAR_GPU == counted.total() + of_teams


async def test_a_sidecar_itself_costs_no_more_than_the_budget_says(tmp_path):
    """All that a sidecar may have, none of which works: two logs, a state, spans, events, GPUs and an engine."""
    config = SidecarConfig(
        requests_log=(str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")),
        state=str(tmp_path / "state"),
        events=str(tmp_path / "events.jsonl"),
        otlp=OtlpConfig(endpoint="http://127.0.0.1:9"),
        engines=(EngineTarget("e", "http://127.0.0.1:9"),),
    )
    sidecar = Sidecar(config)
    await sidecar.start()
    try:
        await until(lambda: sidecar.ready, "a sidecar that is ready")
        assert len(samples(sidecar.page())) <= budget.SIDECAR_FIXED + budget.SIDECAR_ENGINE
    finally:
        await sidecar.stop()


# ---- the formula


def test_a_fleet_is_the_sum_of_its_pages():
    one = budget.total(Fleet(engines=1, teams=0, gateways=0, sidecars=0))
    assert {"engines": 559 + budget.MADE_BY_SCRAPE, "sidecars": 0, "gateways": 0} == one
    assert 200 * one["engines"] == budget.total(Fleet(engines=200, teams=0, gateways=0, sidecars=0))["engines"]


def test_teams_cost_by_the_models_that_they_use():
    few, more = (budget.total(Fleet(engines=1, teams=teams, models=3)) for teams in (10, 11))
    assert 3 * budget.SIDECAR_TEAM_AND_MODEL == more["sidecars"] - few["sidecars"]


def test_a_rank_costs_what_an_engine_has_by_rank():
    assert budget.ENGINE["0.32"].of_a_rank == budget.engine_page(2) - budget.engine_page(1)


@pytest.mark.parametrize(
    "wrong", [{"engines": 0}, {"engines": 1, "ranks": 0}, {"engines": 1, "teams": -1}, {"engines": 1, "release": "0.9"}]
)
def test_a_fleet_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=r"fleet|release"):
        Fleet(**wrong)


# ---- caps


_WORD = st.text(min_size=1, max_size=60)


@given(st.lists(st.tuples(_WORD, _WORD, st.sampled_from((*get_args(Outcome), None))), max_size=120))
def test_any_log_stays_within_the_series_limits(named):
    """Whatever names a log holds no more than the limits get series."""
    traffic = RequestCounters(BoundedNames(("known",), 5), BoundedNames((), 4))
    for n, (team, model, outcome) in enumerate(named):
        traffic.add(RequestRecord(request_id=f"r{n}", team=team, model=model, outcome=outcome, reason=f"{team}{n}"))
    rows = [labels for _, labels, _ in traffic.samples() if "team" in labels]
    teams, models, reasons = (
        {row[label] for row in rows if label in row} for label in ("team", "model_name", "reason")
    )
    assert len(teams - {OTHER, UNKNOWN_TEAM}) <= 5
    assert len(models) <= 4 + 2
    assert len(reasons) <= budget.REASONS_LIMIT + 1
    assert len(rows) <= budget.SIDECAR_TEAM_AND_MODEL * (5 + 2) * (4 + 2)


def test_any_routes_and_adapters_stay_within_their_series():
    """Each on a page as it is scraped, and the most that the budget allows for is reached."""
    grouped = GroupedLatency()
    grouped.add_all(
        RequestRecord(
            request_id=f"r{n}", model="m", adapter=f"a{n}", route=f"/v1/{n}", outcome="ok", ttft_ms=1, e2e_ms=1
        )
        for n in range(PAIRS + 50)
    )
    text = render(grouped.samples())
    assert budget.SIDECAR_GROUPED == sum(not line.startswith("#") for line in text.splitlines())


def test_a_model_that_was_never_served_takes_no_place():
    """A client may ask for any name; only one that an engine served gets series."""
    traffic = RequestCounters(BoundedNames(), BoundedNames())
    for n in range(200):
        traffic.add(
            RequestRecord(request_id=f"r{n}", team="a", model=f"guess-{n}", outcome="rejected", reason="bad_request")
        )
    assert {OTHER} == {labels["model_name"] for _, labels, _ in traffic.samples() if "model_name" in labels}


def test_a_key_that_belongs_to_nobody_is_one_team_at_the_gateway():
    shown = GatewayMetrics()
    for _ in range(50):
        shown.began(None)
        shown.ended(None, "rejected", 401, "unknown_key")
    assert {UNKNOWN_TEAM} == set(re.findall(r'team="([^"]*)"', _page(shown)))


def test_vllm_itself_has_two_families_that_nothing_caps():
    """What runs together is a label's value there: every combination of adapters stays a series for ever, so only
    sample_limit ends it."""
    assert {"running_lora_adapters", "waiting_lora_adapters"} < set(vllm.LORA_REQUESTS_INFO.labels)


def example() -> Fleet:
    """The fleet that docs/guides/fleet.md counts: 200 engines, one on each GPU, eight to a host with its sidecar, four
    gateways, 50 teams."""
    return Fleet(engines=200, models=2, teams=50, sidecars=25, gateways=4, gpus=200)


def budget_table() -> str:
    """What each thing costs in series, as docs/guides/fleet.md shows it."""
    newest, shown = budget.ENGINE[budget.NEWEST], example()
    counted = budget.total(shown)
    rows = (
        *((f"an engine of vLLM {release}, one model", page.samples) for release, page in budget.ENGINE.items()),
        (f"each further data-parallel rank ({budget.NEWEST})", newest.of_a_rank),
        ("the recommended bucket bounds, on each engine or rank", budget.LADDER),
        ("a team and a model it uses, in the sidecar that reads its log", budget.SIDECAR_TEAM_AND_MODEL),
        ("the same where Prometheus stores only native histograms", budget.SIDECAR_TEAM_AND_MODEL_NATIVE),
        ("the same, more with `histogram_ladder: fine`", budget.SIDECAR_FINE_LADDER),
        ("a model, in a sidecar", budget.SIDECAR_MODEL), ("an engine, in its sidecar", budget.SIDECAR_ENGINE),
        ("a GPU, in its sidecar", budget.SIDECAR_GPU), ("a MIG instance, beside its GPU", budget.SIDECAR_INSTANCE),
        ("routes and LoRA adapters, in a sidecar", budget.SIDECAR_GROUPED),
        ("a sidecar itself", budget.SIDECAR_FIXED),
        ("a team, in each gateway", budget.CREATED * budget.GATEWAY_TEAM),
        ("an upstream, in each gateway", budget.CREATED * budget.GATEWAY_UPSTREAM),
        ("a gateway itself", budget.CREATED * budget.GATEWAY_FIXED),
        ("a target, made by Prometheus", budget.MADE_BY_SCRAPE),
        *((f"**{shown.engines} engines, {shown.teams} teams: {what}**", most) for what, most in counted.items()),
        ("**together**", sum(counted.values())),
    )  # fmt: skip
    return "| what | series at most |\n|---|---:|\n" + "\n".join(f"| {what} | {most:,} |" for what, most in rows) + "\n"


def test_the_page_of_the_budget_says_what_the_code_computes():
    """docs/guides/fleet.md."""
    text = (ROOT / "docs/guides/fleet.md").read_text()
    assert budget_table() in text
    assert all(name in text for name in ("VLLMScrapeNearLimit", "VLLMTeamLabelOverflow"))
