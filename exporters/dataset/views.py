"""Documented SQL views of a data set, in the dialects of DuckDB, ClickHouse and Trino. Pure.

Invariant: a view has the same rows in every dialect. Totals equal the counters of a sidecar that read the same log,
by model and team; a sidecar counts names beyond its limits as `__other__`, the views never do."""

# ruff: noqa: S608 - names and expressions in SQL are constants of this module

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from exporters.requests.bounded_names import UNKNOWN_MODEL
from exporters.requests.phases import PHASES
from exporters.requests.record import UNKNOWN_TEAM, Outcome

OUTCOMES = get_args(Outcome)
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_SHARES = [*QUANTILES.values()]
TIMES = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "engine_queue_ms")


@dataclass(frozen=True, slots=True)
class Dialect:
    """Expressions that differ between engines. quantile: expression and quantile -> exact quantile, interpolated."""

    name: str
    minus_ms: Callable[[str, str], str]
    quantile: Callable[[str, float], str]
    hour: Callable[[str], str]
    day: Callable[[str], str]
    ends_with: Callable[[str, str], str]


DUCKDB = Dialect(
    "duckdb",
    minus_ms=lambda ts, ms: f"{ts} - to_microseconds(CAST(round({ms} * 1000) AS BIGINT))",
    # all of a column from one copy of its values: DuckDB computes equal expressions once
    quantile=lambda value, q: f"quantile_cont({value}, {_SHARES})[{_SHARES.index(q) + 1}]",
    hour=lambda ts: f"date_trunc('hour', {ts})",
    day=lambda ts: f"CAST({ts} AS DATE)",
    ends_with=lambda text, end: f"ends_with({text}, '{end}')",
)
CLICKHOUSE = Dialect(
    "clickhouse",
    minus_ms=lambda ts, ms: f"subtractMicroseconds({ts}, toInt64(round({ms} * 1000)))",
    quantile=lambda value, q: f"quantileExactInclusive({q:g})({value})",
    hour=lambda ts: f"toStartOfHour({ts})",
    day=lambda ts: f"toDate({ts})",
    ends_with=lambda text, end: f"endsWith({text}, '{end}')",
)
TRINO = Dialect(
    "trino",
    minus_ms=lambda ts, ms: f"{ts} - CAST(round({ms}) AS BIGINT) * INTERVAL '0.001' SECOND",
    # Trino has no exact quantile; its t-digest is within about 1 %
    quantile=lambda value, q: f"approx_percentile({value}, {q:g})",
    hour=lambda ts: f"date_trunc('hour', {ts})",
    day=lambda ts: f"CAST({ts} AS DATE)",
    ends_with=lambda text, end: f"substr({text}, -{len(end)}) = '{end}'",
)


@dataclass(frozen=True, slots=True)
class DatasetView:
    """SQL view. meaning: what a row is. select: dialect -> query, which reads `requests` or, as that view itself does,
    the rows of segments and live lines."""

    name: str
    meaning: str
    select: Callable[[Dialect], str]


# Routes that generate nothing, as in counters.py
_ASIDE = ("/models", "/tokenize", "/detokenize", "/load_lora_adapter", "/unload_lora_adapter", "/health", "/version")
_GOOD = "(outcome IS NULL OR outcome = 'ok')"
# As record.estimated_tokens.
_EST_COMPLETION = "CASE WHEN completion_tokens IS NULL THEN est_completion_tokens END"
ESTIMATED = {
    "prompt": f"CASE WHEN prompt_tokens IS NULL AND ({_EST_COMPLETION} IS NOT NULL OR (unreadable IS NOT NULL AND"
    " outcome = 'ok')) THEN est_prompt_tokens END",
    "completion": _EST_COMPLETION,
}


def _layers(source: str, layers: Sequence[Mapping[str, str]]) -> str:
    """Return nested queries that each add columns to all of the one inside."""
    for number, layer in enumerate(layers):
        columns = ", ".join(f"{sql} AS {name}" for name, sql in layer.items())
        source = f"(SELECT *, {columns} FROM {source}) AS s{number}"
    return f"SELECT * FROM {source}"


def _requests(d: Dialect) -> str:
    """Rows with derived columns: labels as the sidecar has them, times, and the phases of phases.py."""
    aside = " OR ".join(d.ends_with("coalesce(route, '')", route) for route in _ASIDE)
    unfinished = "finish_reason IN ('abort', 'error', 'rejected')"
    return _layers(
        "recorded",
        (
            {
                "team_label": f"coalesce(team, '{UNKNOWN_TEAM}')",
                "model_label": f"coalesce(model, '{UNKNOWN_MODEL}')",
                "outcome_label": "coalesce(outcome, 'unknown')",
                "started_at": d.minus_ms("ts", "coalesce(e2e_ms, 0)"),
                "texts": f"CASE WHEN {aside} THEN 0 ELSE coalesce(n, 1) END",
                "finished": f"CASE WHEN (finish_reason IS NULL OR NOT {unfinished}) AND ({_GOOD} OR (outcome ="
                " 'client_abort' AND finish_reason IS NOT NULL)) THEN 1 ELSE 0 END",
                "total_ms": "coalesce(e2e_ms, 0)",
                "waited_ms": "least(coalesce(queue_ms, 0), coalesce(e2e_ms, 0))",
                "reported": "CASE WHEN engine_queue_ms IS NULL AND engine_ttft_ms IS NULL THEN 0 ELSE 1 END",
            },
            {
                "before_ms": "least(greatest(0, coalesce(ttft_ms, total_ms - coalesce(client_wait_ms, 0)) - waited_ms),"
                " total_ms - waited_ms)"
            },
            {
                "engine_queue_phase_ms": "CASE WHEN reported = 1 THEN least(coalesce(engine_queue_ms, 0), before_ms)"
                " ELSE 0 END",
                "after_ms": "total_ms - waited_ms - before_ms",
                "rest_phase": "CASE WHEN reported = 1 THEN CASE"
                f" WHEN ttft_ms IS NULL AND {_GOOD} THEN 'decode' WHEN tried IS NOT NULL THEN 'attempts'"
                " ELSE 'network' END WHEN outcome = 'rejected' AND upstream IS NULL THEN 'gateway_queue'"
                " WHEN outcome = 'rejected' THEN 'engine'"
                f" WHEN tried IS NOT NULL AND ttft_ms IS NULL AND NOT {_GOOD} THEN 'attempts' ELSE 'engine' END",
            },
            {
                "prefill_phase_ms": "CASE WHEN reported = 1 THEN least(coalesce(engine_ttft_ms, 0), before_ms -"
                " engine_queue_phase_ms) ELSE 0 END",
                "streamed_ms": "CASE WHEN ttft_ms IS NULL THEN 0 WHEN tpot_ms IS NULL OR completion_tokens IS NULL"
                " THEN CASE WHEN coalesce(completion_tokens, 0) = 1 OR (coalesce(reason, '') = 'client_stalled'"
                " AND client_wait_ms IS NULL) THEN 0"
                " ELSE after_ms END ELSE least(tpot_ms * greatest(0, completion_tokens - 1), after_ms) END",
            },
            {
                "rest_ms": "before_ms - engine_queue_phase_ms - prefill_phase_ms",
                # waits for the client between tokens; those behind the last one are in what follows it
                "held_ms": "least(greatest(0, coalesce(client_wait_ms, 0) - (after_ms - streamed_ms)), streamed_ms)",
            },
            {
                "gateway_queue_phase_ms": "waited_ms + CASE WHEN rest_phase = 'gateway_queue' THEN rest_ms ELSE 0 END",
                **{
                    f"{name}_phase_ms": f"CASE WHEN rest_phase = '{name}' THEN rest_ms ELSE 0 END"
                    for name in ("attempts", "network", "engine")
                },
                "decode_phase_ms": "streamed_ms - held_ms + CASE WHEN rest_phase = 'decode' THEN rest_ms ELSE 0 END",
                "delivery_phase_ms": "after_ms - streamed_ms + held_ms",
            },
        ),
    )


def _grouped(keys: Mapping[str, str], columns: Mapping[str, str], where: str = "") -> str:
    """Return one row for each combination of keys.

    Named in an outer query: ClickHouse reads an alias that is also a column as the alias."""
    every = {**keys, **columns}
    inner = ", ".join(f"{sql} AS c{number}" for number, sql in enumerate(every.values()))
    outer = ", ".join(f"c{number} AS {name}" for number, name in enumerate(every))
    source = f"requests{where and f' WHERE {where}'} GROUP BY {', '.join(keys.values())}"
    return f"SELECT {outer} FROM (SELECT {inner} FROM {source}) AS g"


_BY_TEAM = {"cluster": "cluster", "model": "model_label", "team": "team_label"}
_TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")


def _count(condition: str) -> str:
    return f"sum(CASE WHEN {condition} THEN 1 ELSE 0 END)"


def _traffic(_: Dialect) -> str:
    outcomes = {name: _count(f"outcome_label = '{name}'") for name in (*OUTCOMES, "unknown")}
    return _grouped(
        _BY_TEAM,
        {
            "requests": "count(*)",
            **outcomes,
            **{name: f"sum({name})" for name in _TOKENS},
            **{f"estimated_{kind}_tokens": f"sum({sql})" for kind, sql in ESTIMATED.items()},
            "unreadable_requests": _count("unreadable IS NOT NULL"),
        },
    )


def _reasons(_: Dialect) -> str:
    keys = {**_BY_TEAM, "outcome": "outcome_label", "reason": "coalesce(reason, 'unknown')"}
    return _grouped(keys, {"requests": "count(*)"}, "outcome_label NOT IN ('ok', 'unknown')")


def _finished(_: Dialect) -> str:
    return _grouped(
        _BY_TEAM,
        {
            "requests": "sum(finished * texts * coalesce(prompts, 1))",
            "prompt_tokens": "sum(finished * texts * coalesce(prompt_tokens, 0))",
            "cached_tokens": "sum(finished * texts * coalesce(cached_tokens, 0))",
            "completion_tokens": "sum(CASE WHEN finished * texts > 0 AND prompt_tokens IS NOT NULL THEN"
            " coalesce(completion_tokens, 0) ELSE 0 END)",
        },
    )


def _latency(d: Dialect) -> str:
    columns: dict[str, str] = {}
    for time in TIMES:
        short = time.removesuffix("_ms")
        columns |= {f"{short}_count": f"count({time})", f"{short}_sum_ms": f"sum({time})"}
        columns |= {f"{short}_{name}_ms": d.quantile(time, q) for name, q in QUANTILES.items()}
        columns[f"{short}_max_ms"] = f"max({time})"
    return _grouped(_BY_TEAM, columns)


def _hourly(d: Dialect) -> str:
    keys = {"hour": d.hour("ts"), **_BY_TEAM}
    columns = {"requests": "count(*)", "errors": _count("outcome_label NOT IN ('ok', 'unknown')")}
    return _grouped(keys, columns | {name: f"sum({name})" for name in _TOKENS})


def _engines(_: Dialect) -> str:
    keys = {"cluster": "cluster", "engine": "upstream", "model": "model_label"}
    return _grouped(
        keys,
        {
            "requests": "count(*)",
            "errors": _count("outcome IN ('upstream_error', 'timeout')"),
            "failed_before": _count("tried IS NOT NULL"),
            **{name: f"sum({name})" for name in _TOKENS},
            "engine_queue_ms": "sum(engine_queue_ms)",
        },
        "upstream IS NOT NULL",
    )


def _phases(_: Dialect) -> str:
    names = [name for name in PHASES if name != "stall"]
    return _grouped(_BY_TEAM, {f"{name}_ms": f"sum({name}_phase_ms)" for name in names} | {"e2e_ms": "sum(total_ms)"})


VIEWS = (
    DatasetView(
        "requests", "one request, with start, labels as the sidecar has them, and the length of each phase", _requests
    ),
    DatasetView("traffic", "requests by outcome, and tokens, of a cluster, model and team", _traffic),
    DatasetView("reasons", "requests that failed, by outcome and reason", _reasons),
    DatasetView(
        "finished", "work as the engine counts it: each of n texts for each prompt, without aborted requests", _finished
    ),
    DatasetView(
        "latency", "count, sum, quantiles and maximum of the times of a cluster, model and team, in ms", _latency
    ),
    DatasetView("hourly", "requests, errors and tokens of each hour", _hourly),
    DatasetView("engines", "requests, errors, failed attempts and tokens of an upstream", _engines),
    DatasetView("phases", "time in each phase; the phases sum to e2e_ms", _phases),
)
BY_NAME = {view.name: view for view in VIEWS}
