"""Exceptions of the dashboard lint, with their reasons. An entry that nothing needs is a finding."""

from __future__ import annotations

from dashboards.lint_model import AllowedFinding

EXCEPTIONS: tuple[AllowedFinding, ...] = (
    AllowedFinding(
        "query-buckets",
        "vllm-watch-latency/Share below the first bound/*",
        "asks for the lowest and the highest bucket: min and max over le",
    ),
    AllowedFinding(
        "query-labels",
        "vllm-watch-kv-cache/Engines and their caches/A",
        "every field of vLLM's CacheConfig is a label, more with each release",
    ),
    AllowedFinding(
        "query-labels", "*p95, by team/B", "beyond its buckets a percentile carries the label bound, and else not"
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-overview/Unknown key or model/A",
        "they belong to no model and mostly to no team that could be chosen",
    ),
    AllowedFinding(
        "query-matchers", "vllm-watch-cost/Price/A", "whether prices are set does not depend on which team is chosen"
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-teams/* by team (estimate)/?",
        "a team's share is one of the work of all teams and models, chosen or not",
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-teams/Engine errors by route and status/A",
        "the board is about teams: none chooses a job or an address",
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-cost/Cost per 1K tokens, all GPUs/A",
        "all that the GPUs cost, over all tokens: no part of either alone",
    ),
    AllowedFinding(
        "query-matchers", "vllm-watch-fleet/Balance: */A", "the whole is that of all engines of a model, chosen or not"
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-gpu/Tokens per joule/A",
        "the watts are those of all GPUs of a cluster, so the tokens are as well",
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-monitoring-health/S*, by target/A",
        "which targets are engines does not depend on which of them are chosen",
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-monitoring-health/Targets up, by job/A",
        "which targets are engines does not depend on which of them are chosen",
    ),
    AllowedFinding(
        "query-matchers",
        "vllm-watch-monitoring-health/Successful requests: log and engine/?",
        "two sides, each narrowed only by what the other has too",
    ),
    AllowedFinding(
        "query-rate-interval", "vllm-watch-fleet/Engines hung/A", "asks what its alert asks, over the alert's window"
    ),
    AllowedFinding(
        "query-rate-interval",
        "vllm-watch-fleet/Engines, fullest first/I",
        "asks what its alert asks, over the alert's window",
    ),
    AllowedFinding(
        "query-rate-interval",
        "vllm-watch-fleet/Engines hung, by */A",
        "asks what its alert asks, over the alert's window",
    ),
    AllowedFinding(
        "panel-percentile",
        "vllm-watch-fleet-weeks/*, p95, *",
        "where it is recorded, the quantile was taken by the rule",
    ),
    AllowedFinding(
        "query-series",
        "vllm-watch-fleet-weeks/*",
        "asks a store that keeps what our rules record and nothing else; Fleet asks raw series",
    ),
    AllowedFinding(
        "template-label-values", "vllm-watch-fleet-weeks/variable *", "the same: no engine's own series is there"
    ),
    AllowedFinding(
        "query-raw-counter",
        "vllm-watch-tuning/Last event of each kind/B",
        "kept in a file, it never restarts: how many are on record",
    ),
)
