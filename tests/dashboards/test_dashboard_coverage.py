"""Every family of vLLM's is on a panel or says why not, and the page that says so is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dashboards import coverage
from dashboards import queries as query_builders
from dashboards.model import Dashboard, DashboardRow, Panel, Query
from dashboards.registry import BOARDS
from exporters.catalogue import VLLM, promql, sidecar, vllm


def test_every_family_is_shown_or_says_why_not():
    """Those of a running engine and those that need a flag alike; a reason for one that is shown is stale."""
    assert [] == coverage.unexplained(BOARDS)


def board(*queries, title="P"):
    panels = tuple(Panel(f"p{at}", title, "A.", "B.", "C.", (query,)) for at, query in enumerate(queries))
    return Dashboard("small", "Small", "Is it?", (DashboardRow("", panels),))


def test_family_is_shown_by_any_of_its_names():
    """A family is shown where a query reads it or an older name of it."""
    older = Query(f"rate({vllm.PREFIX_CACHE_HITS.formerly[0]}[5m])")
    at = coverage.shown(
        [board(query_builders.rate(vllm.PREFIX_CACHE_HITS), query_builders.p95(vllm.TIME_TO_FIRST_TOKEN), older)]
    )
    assert ("small/p0", "small/p2") == at[vllm.PREFIX_CACHE_HITS]
    assert ("small/p1",) == at[vllm.TIME_TO_FIRST_TOKEN]
    assert () == at[vllm.NUM_REQUESTS_RUNNING]


def test_a_family_that_only_has_to_be_there_is_not_shown():
    expr = (
        f"{query_builders.rate(vllm.GENERATION_TOKENS, ('instance',)).expr} and on (instance)"
        f" {promql.series(vllm.NUM_REQUESTS_RUNNING)}"
    )
    assert () == coverage.shown([board(Query(expr))])[vllm.NUM_REQUESTS_RUNNING]


def test_a_missing_family_and_a_stale_reason_are_told(monkeypatch):
    monkeypatch.setattr(coverage, "NOT_SHOWN", {vllm.GENERATION_TOKENS: "a test"})
    told = coverage.unexplained([board(query_builders.rate(vllm.GENERATION_TOKENS))])
    assert f"{vllm.GENERATION_TOKENS.name} is on small/p0 after all" == told[-1]
    assert len(VLLM) == len(told)


@pytest.fixture(scope="module")
def page():
    """Two boards: one that an engine fills, one that needs the request log."""
    first = board(query_builders.rate(vllm.GENERATION_TOKENS), query_builders.now(vllm.NUM_REQUESTS_RUNNING))
    return coverage.table(
        [first, replace(board(query_builders.rate(sidecar.REQUESTS), title="A | B"), slug="log", title="Log")]
    )


@pytest.mark.parametrize(
    "line",
    [
        "| small | Is it? | 2 | 2 | 2 |",
        "| log | Is it? | 1 | 1 | 0 |",
        "| **all 2** | | 3 | 3 | 2 |",
        f"| `{vllm.GENERATION_TOKENS.name}` | small/p0 |",
        "| p0 | A \\| B | reqps | the sidecar (vllm-watch sidecar run) |",
        "| p1 | P | suffix: req | a vLLM engine |",
        "## Panels of Log",
    ],
)
def test_the_page_counts_panels_and_names_what_they_need(page, line):
    assert line in page.splitlines()


def test_family_without_a_reason_is_not_passed_over(page):
    """A family without a reason is not passed over on the page."""
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{vllm.TIME_TO_FIRST_TOKEN.name}` |")]
    assert "no reason" in row
