"""docs/reference/upgrades.md: changed defaults of this stack, and changes for operators by vLLM release.

Which series came, went and were renamed is the catalogue's to say; by hand are only the notes, each with its grade and
its source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from exporters.catalogue import RETIRED, VLLM
from exporters.catalogue.metric import Metric, Provenance, key
from stack.reference.markdown import PRINTED, listed, table

OLDEST = (0, 9)  # before it: the V0 engine, whose series docs/reference/metrics.md lists as retired
_LIVE, _CAPTURED, _NOT = "tested live", "tested on captured data", "not tested"


@dataclass(frozen=True, slots=True)
class Note:
    """Further note on a release. grade: how certain; source: its origin."""

    text: str
    grade: str
    source: str


NOTES: dict[str, tuple[Note, ...]] = {
    "0.33": (
        Note(
            "Twelve families more, all of KV connectors or offloading: MooncakeConnector 6, UMBPStoreConnector 4, the"
            " configuration of offload managers and the latency of promotions between tiers. None was renamed or"
            " removed.",
            _NOT,
            "source of 0.32.0 and 0.33.0 compared",
        ),
        Note(
            "Elastic expert parallelism: while an engine scales, and on a retired rank, every path but `/health` and"
            " `/is_scaling_elastic_ep` answers 503, `/metrics` included.",
            _NOT,
            "source of 0.33.0",
        ),
        Note(
            "`VLLM_REQUEST_BODY_LOG_LEVEL=INFO` writes request bodies, prompts included, into the engine's log; the"
            " default is DEBUG.",
            _NOT,
            "source of 0.33.0",
        ),
        Note(
            "`--watchdog-config` with a `dump_dir` writes the stacks of a stalled engine to a file; `/health` and"
            " `/metrics` do not change.",
            _NOT,
            "source of 0.33.0",
        ),
        Note(
            "`--prefill-schedule-interval N` also works without data parallelism: prompts are computed in every Nth"
            " step only, so gaps between tokens are shorter and first tokens later. Its default is 1, as before.",
            _NOT,
            "source of 0.33.0",
        ),
        Note(
            "The Rust frontend (`VLLM_USE_RUST_FRONTEND=1`, off by default) shows the six Mooncake families, too, and"
            " its binary names every route that the gateway records. It refuses bodies above"
            " `VLLM_HTTP_MAX_REQUEST_BODY_SIZE`, 32 MiB by default, which the Python frontend does not: keep"
            " `limits.body_bytes` of the gateway at or below it.",
            _NOT,
            "source of 0.33.0 and strings of its binary",
        ),
        Note(
            "`POST /v1/decisions` is new. The gateway counts and records its requests; remove it from `also_pass`,"
            " where the gateway no longer accepts it.",
            _NOT,
            "source of 0.33.0",
        ),
    ),
    "0.32": (
        Note(
            "`--enable-per-request-metrics` puts queue time, and the time from scheduling to the first token, into an"
            " object `metrics` beside `usage`; the compose file sets it. By source it is there from 0.27 on.",
            _LIVE,
            "measured on 0.32.0",
        ),
        Note(
            "A stream that is refused by `--max-num-queued-reqs` may answer HTTP 200 and one error event: 19 of 28 did,"
            " 9 were a 503.",
            _LIVE,
            "measured on 0.32.0",
        ),
        Note(
            "Queried prefix-cache tokens equal prompt tokens again; on 0.20.2 retries under preemption counted eight"
            " times as many. A hit ratio survives the upgrade, a rate of queries does not.",
            _CAPTURED,
            "pages of 0.20.2 and 0.32.0",
        ),
        Note(
            "`iteration_tokens_total` no longer holds cached prompt tokens: batches look smaller than on 0.20.2.",
            _CAPTURED,
            "pages of 0.20.2 and 0.32.0",
        ),
        Note(
            "The usual image is built for CUDA 13 and wants driver 580; tags that end in -cu129 run on older ones.",
            _NOT,
            "head of docker-compose.yml",
        ),
    ),
    "0.29": (
        Note(
            "New: `--max-num-queued-reqs` (running requests count too) and `--max-num-queued-tokens` refuse what would"
            " wait.",
            _NOT,
            "vllm#49445",
        ),
    ),
    "0.24": (
        Note("Model FLOPs of DeepSeek-style models (MLA) were unusable before.", _NOT, "vllm#39457"),
        Note("`cache_config_info` says `kv_cache_size_tokens` and `kv_cache_max_concurrency`.", _NOT, "vllm#42206"),
    ),
    "0.20": (
        Note(
            "`num_requests_waiting` now includes requests that are held back (deferred): the same load shows a longer"
            " queue. Reason capacity of `num_requests_waiting_by_reason` says that the engine is full.",
            _CAPTURED,
            "page of 0.20.2",
        ),
        Note(
            "No `--enable-per-request-metrics` yet: set `VLLM_WATCH_ENGINE_NEWER` to nothing for this image and older"
            " ones.",
            _LIVE,
            "help of 0.20.2",
        ),
    ),
    "0.12": (Note("PyTorch 2.9 and CUDA 12.9: look at the driver first.", _NOT, "vLLM's release notes of 0.12.0"),),
    "0.11": (
        Note(
            "The V0 engine is gone, with `VLLM_USE_V1`; there is no way back by a variable.",
            _NOT,
            "vLLM's release notes of 0.11.0",
        ),
        Note(
            "CUDA graphs default to FULL_AND_PIECEWISE: more memory at the start, so check the KV cache's size.",
            _NOT,
            "vLLM's release notes of 0.11.0",
        ),
    ),
    "0.10": (
        Note(
            "Spans over `grpc://` want TLS unless `OTEL_EXPORTER_OTLP_TRACES_INSECURE=true`; the compose file sets it.",
            _LIVE,
            "measured on 0.10.2",
        ),
        Note("Older and newer cache names stand side by side: never add the two.", _CAPTURED, "pages of 0.10.2"),
    ),
}

_INTRO = f"""# Upgrading vLLM under the stack

{PRINTED.format(source="`stack/reference/upgrades.py` and the catalogue")}

vLLM renames a series in three steps: deprecated in one minor release, hidden in the next
(`--show-hidden-metrics-for-version` brings it back for one release), removed after that; some were removed without.
Boards, alerts and recordings here ask for the older and the newer name in one query, so a fleet that mixes releases is
counted whole, and a panel whose family the engine does not have says so. Boards of your own do not: check them.

## Before and after

Before, with the engine that runs now. Keep the page: it is what you compare with.

```sh
curl -s http://127.0.0.1:8000/metrics > before.prom
vllm-watch metrics check http://127.0.0.1:8000 --dashboard mine.json
vllm-watch annotate "vLLM upgrade begins"
```

What the new release would change, before it serves anybody: its source is read, nothing of it is started and no GPU is
needed.

```sh
vllm-watch metrics drift --installed /opt/vllm-next/bin/python
```

After, with the new engine and under load:

```sh
vllm-watch metrics drift http://127.0.0.1:8000 --before before.prom
vllm-watch metrics check http://127.0.0.1:8000 --dashboard mine.json
vllm-watch doctor http://127.0.0.1:8000
vllm-watch runbook --firing
```

`drift` exits 0 when the catalogue says what is there, 1 when it does not. Bounds that moved make quantiles jump without
any request being slower, so it reports them too. The Rust frontend shows fewer families: what its
endpoint lacks is listed as unshown and not as gone; `--installed` shows it.

One engine at a time: with a second one behind the gateway, `vllm-watch compare` compares the two variants on live
traffic."""

# What an upgrade of this stack itself changes without any change of a file: default, and how to have the former one.
CHANGED_DEFAULTS = (
    (
        (
            "A team with `max_running` gets 400 `too_many_outputs` for a request of more texts than that (`n` or"
            " `best_of`, times its prompts)."
        ),
        "`max_outputs` of the team",
    ),
    (
        (
            "`max_running`, ceilings and floors count slots: a request holds one for each text, and on embedding,"
            " rerank and score routes one for each 8,192 prompt tokens."
        ),
        "a larger `max_running`",
    ),
    (
        (
            "A client that leaves before the usage has come leaves its team charged with the expected output, in the"
            " turns of teams; log-probabilities count there as well."
        ),
        "none: leaving early was free",
    ),
    (
        (
            "What clients have not read of replies counts among `limits.bodies_bytes`; beyond it a request keeps its"
            " slot."
        ),
        "a larger `limits.bodies_bytes`",
    ),
    (
        (
            "A body, or its `sampling_params`, with more than 1,000 fields is 400 `bad_body`, and so are"
            " `sampling_params` of more than 2 MiB."
        ),
        "none: APIs have some 60",
    ),
    (
        "Engines get the headers of a list, and no others of a client.",
        "`pass_headers` in gateway.yaml names further ones, such as baggage or idempotency-key",
    ),
    (
        "`/metrics` and `/health` through the gateway are what its watch has read last; no engine is asked.",
        "scrape the engine itself",
    ),
    (
        (
            "At a reload, a teams.yaml that has no teams, is the beginning of the former one, or lost its last line"
            " break keeps the former policy in force."
        ),
        "add or change a line as well; a start takes any file",
    ),
    (
        "`stream_interval` of a request is sent to the engine as 1.",
        "none: tokens that a client has read are on its bill",
    ),
    (
        "At most 16 requests of one team run on routes without a record; one more is 429 `team_limit`.",
        "none: they held the engine's API server from other teams",
    ),
    (
        (
            "An engine that is silent for no longer than its open requests explain is `slow` (`busy`) and stays in"
            " rotation."
        ),
        "`max_logprobs`, `max_prompt_logprobs` and `max_outputs` of teams keep that time short",
    ),
)

_OUTRO = "Test status: [upgrades (reference)](../internals/test-status.md#upgrades-reference).\n"


def page() -> str:
    """The whole page."""
    defaults = ("## vllm-watch: changed defaults", "", *table(("now", "as before"), CHANGED_DEFAULTS))
    return "\n".join((_INTRO, "", *defaults, *(line for release in releases() for line in _section(release)), _OUTRO))


def releases() -> list[str]:
    """Minor releases of which there is something to say, the newest first."""
    named = {_minor(bound) for metric in (*VLLM, *RETIRED) for bound in (metric.since, metric.until) if bound} | set(
        NOTES
    )
    return sorted((release for release in named if key(release)[:2] >= OLDEST), key=key, reverse=True)


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def _section(release: str) -> Iterator[str]:
    came = [metric for metric in VLLM if metric.since and _minor(metric.since) == release]
    renamed = [metric for metric in came if metric.formerly]
    new = [metric for metric in came if not metric.formerly]
    gone = [metric for metric in RETIRED if metric.until and _minor(metric.until) == release]
    yield from (f"## vLLM {release}", "")
    yield from listed(
        [
            *(f"renamed: `{old}` is `{metric.name}`{_doubt(metric)}" for metric in renamed for old in metric.formerly),
            *_told("gone", gone),
            *_told("new, shown by default", [metric for metric in new if not metric.needs]),
            *(
                f"new with {need}: {_names(metric for metric in new if metric.needs == need)}"
                for need in dict.fromkeys(m.needs for m in new if m.needs)
            ),
        ]
    )
    if notes := NOTES.get(release):
        yield from table(
            ("beside the series", "grade", "source"), ((note.text, note.grade, note.source) for note in notes)
        )


def _told(what: str, metrics: list[Metric]) -> Iterator[str]:
    if metrics:
        yield f"{what}: {_names(metrics)}"


def _names(metrics: Iterable[Metric]) -> str:
    return ", ".join(f"`{metric.name}`{_doubt(metric)}" for metric in metrics)


def _doubt(metric: Metric) -> str:
    return " (from source)" if metric.evidence is Provenance.SOURCE else ""
