"""The reference pages: whole, and as true as what they are printed from. And the worked examples of the definitions,
computed again."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from alerts.registry import ALERTS, RECORDINGS, recorded_families
from dashboards.registry import BOARDS
from exporters.catalogue import EVERYTHING, OURS, VLLM
from exporters.catalogue.metric import Metric
from runbooks import page as runbook_page
from runbooks import page_check
from stack import reference
from stack.drill.drills import WHY_NOT
from stack.reference import alerts, metrics, runbooks, use
from stack.root import ROOT
from tests.support import admission_scenarios, worked_examples
from tests.support.admission_sim import Ended, percentile
from tests.support.alert_cases import CASES


@cache
def printed() -> dict[str, str]:
    """Name and text of each page; not while tests are collected, which every process does."""
    return {path.name: text for path, text in reference.pages()}


def test_families_have_one_heading_and_one_row():
    """Every family of the catalogue has one heading and one row."""
    listed = [metric.name for topic in metrics.topics() for metric in topic.metrics]
    assert sorted(listed) == sorted({metric.name for metric in EVERYTHING})
    headings = re.findall(r"^### (.*)$", printed()["metrics.md"], re.MULTILINE)
    assert listed == headings


def test_no_two_headings_of_a_page_share_an_anchor():
    for name, text in printed().items():
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert len(headings) == len({page_check.slug(heading) for heading in headings}), name


def test_page_gives_meaning_traps_names_and_flags():
    """A page says meaning traps former names and flags of each family."""
    text = printed()["metrics.md"]
    for metric in (metric for topic in metrics.topics() for metric in topic.metrics):
        entry = text.split(f"\n### {metric.name}\n", 1)[1].split("\n### ", 1)[0]
        for told in (metric.meaning, *metric.notes, metric.needs, *metric.formerly, *metric.labels):
            assert told in entry, (metric.name, told)


def test_panels_and_alerts_of_a_family_query_it():
    """By the plain words of the queries, which is another way than the one that the page goes."""
    words = {
        f"{b.slug}/{p.slug}": {word for q in p.queries for word in re.findall(r"[\w:]+", q.expr)}
        for b in BOARDS
        for p in b.panels
    }
    for metric in (*VLLM, *OURS):
        named = {place for place, said in words.items() if said & set(metric.samples)}
        assert named == {f"{b.slug}/{p.slug}" for b, p in use.panels(metric)}, metric.name
    assert {"VLLMCacheHitsCollapsed"} <= {a.name for a in use.alerts(_metric("vllm:prefix_cache_hits_total"))}
    assert {"VLLMTTFTBudgetBurn", "VLLMTTFTHigh"} <= {
        a.name for a in use.alerts(_metric("vllm:time_to_first_token_seconds"))
    }


def _metric(name: str) -> Metric:
    return next(metric for metric in EVERYTHING if metric.name == name)


def test_alert_entries_are_complete():
    """Every alert has an entry with number panel page and drill."""
    text = printed()["alerts.md"]
    for alert in ALERTS:
        entry = text.split(f"\n### {alert.name}\n", 1)[1].split("\n### ", 1)[0]
        assert alert.title in entry
        assert f"{alert.panel.board}/{alert.panel.panel}" in entry
        assert f"../runbooks/{alert.name}.md" in entry
        number = (
            (alert.threshold.shown, alert.threshold.why, alert.threshold.source)
            if alert.threshold
            else ("no number of its own",)
        )
        assert all(told in entry for told in number), alert.name
        assert (WHY_NOT.get(alert.name) or alerts.drill(alert)) in entry


def test_every_alert_has_the_case_that_the_page_promises():
    assert {case.alert for case in CASES} == {alert.name for alert in ALERTS}


def test_every_recorded_series_is_on_the_page_with_what_it_holds():
    for recording in RECORDINGS:
        assert f"| `{recording.record}` | {recording.meaning} |" in printed()["alerts.md"]
    assert alerts.RECORDED_WHY.keys() == recorded_families().keys(), (
        "say in stack/reference/alerts.py, RECORDED_WHY, what a family is for"
    )


def test_rule_is_followed_to_scraped_series():
    """A rule is read through recorded series down to what is scraped."""
    burn = next(alert for alert in ALERTS if alert.name == "VLLMTTFTBudgetBurn")
    assert "vllm:time_to_first_token_seconds" in {metric.name for metric in use.metrics(burn.expr)}
    assert "cluster_model_name:vllm_slo_ttft_bad:increase5m" in use.read(burn.expr).recorded


def test_runbook_index_names_every_page():
    """The index of runbooks names every page under some symptom."""
    pages = {page.name for page in runbook_page.pages()}
    named = {name for names in runbooks.SYMPTOMS.values() for name in names}
    assert pages == named, "give the page a symptom in stack/reference/runbooks.py, SYMPTOMS"
    assert all(f"(../../runbooks/{name}.md)" in printed()["runbooks.md"] for name in pages)


def test_tables_are_no_wider_than_a_reader_scrolls():
    """What is seen of a row, links without their targets: 400 letters are five lines on a screen."""
    for name, text in printed().items():
        for line in text.splitlines():
            if line.startswith("|"):
                seen = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
                assert len(seen) <= 400, (name, seen)


_EXAMPLES = list(worked_examples.examples((ROOT / "docs/reference/joined-metrics.md").read_text()))


@pytest.mark.parametrize(
    ("name", "given", "gives"), _EXAMPLES, ids=[f"{name}-{at}" for at, (name, _, _) in enumerate(_EXAMPLES)]
)
def test_a_worked_example_is_what_the_product_computes(name, given, gives):
    """To six digits, as the page writes them."""
    assert gives == close(worked_examples.COMPUTED[name](given))


def close(value: Any) -> Any:
    """The same with every number approximate, also inside of what it holds."""
    match value:
        case dict():
            return {key: close(each) for key, each in value.items()}
        case list():
            return [close(each) for each in value]
        case _:
            return pytest.approx(value, abs=6e-7)


def test_every_computation_has_an_example():
    """Every computation has an example on the page and every block is one."""
    assert set(worked_examples.COMPUTED) == {name for name, _, _ in _EXAMPLES}
    assert len(_EXAMPLES) == (ROOT / "docs/reference/joined-metrics.md").read_text().count("```yaml")


def test_a_false_figure_in_an_example_is_found():
    name, given, gives = next(example for example in _EXAMPLES if example[0] == "decode-weight")
    assert {"b": 40.1} != close(worked_examples.COMPUTED[name](given))
    assert gives == close(worked_examples.COMPUTED[name](given))


def test_gateway_scenarios_match_the_simulation():
    """`python tests/support/admission_scenarios.py --write` prints them anew."""
    page = admission_scenarios.PAGE.read_text()
    assert page == admission_scenarios.printed(page)


def test_flood_delays_others_less_than_a_twentieth():
    """What the page says of it in words: the other teams hardly wait, the flooder is refused half, and nothing is lost
    on either side."""
    flood = admission_scenarios.SCENARIOS[0]
    ours, theirs = flood.run(admission_scenarios.OURS), flood.run(admission_scenarios.FIRST_COME)
    for team in ("demo", "docs"):
        assert percentile(ours.waits(team), 0.95) < percentile(theirs.waits(team), 0.95) / 20
    assert [one.arrival for one in sorted(ours.ended, key=_arrived)] == [
        one.arrival for one in sorted(theirs.ended, key=_arrived)
    ]


def _arrived(one: Ended) -> tuple[float, str, float]:
    return one.arrival.at, one.arrival.team, one.arrival.holds_s
