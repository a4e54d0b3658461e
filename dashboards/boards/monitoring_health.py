"""Dashboard Monitoring health: state of the monitoring itself, and reconciliation.

Invariant: nothing here says how vLLM does; a fault on this board means that another board may be wrong."""

from __future__ import annotations

from alerts import thresholds
from dashboards import queries
from dashboards.boards.gateway import LOG, LOOP_LAG
from dashboards.model import ABSENT, RATE, Dashboard, DashboardRow, Panel, Query, Shape, shown_unit
from exporters.catalogue import gateway, golden, promql, reconciled, self_monitoring, ship, sidecar, vllm
from exporters.catalogue.metric import Metric, Unit
from exporters.catalogue.prometheus import SAMPLE_LIMIT, SCRAPE_DURATION, SCRAPE_SAMPLES, SCRAPE_SAMPLES_KEPT, UP

_RANGE = "$__range"
_SOURCE = ("cluster", "job", "instance", "source")
_EACH = ", ".join(_SOURCE)
_OF_GPU = 'kind="gpu"'
_TARGET = ("job", "instance")
_ON = "cluster, job, instance"
_PLACE = queries.where(UP)
# series that each of them always shows; the collector has none before its first span, unless it has a sending queue
_WATCHERS = (
    sidecar.SIDECAR_INFO,
    gateway.LOG_WAITING,
    sidecar.LAB_PROCESS_UP,
    self_monitoring.HEAD_SERIES,
    self_monitoring.ALERTMANAGER_CONFIG_LOADED,
    self_monitoring.EXPORT_QUEUE,
    self_monitoring.SPANS_ACCEPTED,
)
_NO_STATE = "Only where a sidecar keeps its counts on disk: set state in its configuration."
_NO_TRACES = "Only where a sidecar sends spans of requests: set otlp in its configuration."
_NO_BOOKS = (
    "Only where a sidecar reads the request logs and the engines: set requests_log and engines in its configuration."
)
_NO_GOLDEN = (
    "Only where a sidecar reads results of golden checks: run vllm-watch golden check with --result, and set golden in"
    " the sidecar's configuration."
)
_KINDS = ('kind="requests"',), ('kind!="requests"',)
_NO_SPANS = (
    "The collector has counted no span yet, or is not scraped. Point vLLM's --otlp-traces-endpoint at it, send one"
    " request, and let this Prometheus scrape the collector's own page, port 8888."
)


def _targets(metric: Metric, by: tuple[str, ...], within: str) -> tuple[Query, ...]:
    """Return the state of targets, for those that are ours: engines, and who watches them. A Prometheus may be shared
    with others.

    Ours is what showed a series of ours within that time, so that a target which is down does not vanish at once."""
    return tuple(
        Query(
            f"{metric.across} by ({', '.join(by)}) ({promql.series(metric, _PLACE)} and on ({_ON}) "
            f"({' or '.join(promql.last_samples(shown, within, _PLACE) for shown in reported)}))",
            queries.legend(by, called), shown_unit(metric.unit),
        )
        for called, reported in (("engine", (vllm.NUM_REQUESTS_RUNNING,)), ("", _WATCHERS))
    )  # fmt: skip


def _near_limit() -> Query:
    kept, limit = (promql.series(metric, _PLACE) for metric in (SCRAPE_SAMPLES_KEPT, SAMPLE_LIMIT))
    shown = (vllm.NUM_REQUESTS_RUNNING, *_WATCHERS)
    reported = " or ".join(promql.last_samples(each, "1h", _PLACE) for each in shown)
    return Query(
        f"max by (job, instance) ({promql.per(kept, limit)} and on ({_ON}) ({reported}))",
        queries.legend(_TARGET),
        shown_unit(Unit.RATIO),
    )


def _ended(metric: Metric, called: str, *only: str) -> Query:
    """Requests per second, all models together: an adapter has a name of its own in the log and its model's name in the
    engine. Without job and instance, which the log does not know: narrowed to one engine, the two could not agree."""
    where = (*_PLACE, 'model_name=~"$model_name"', *only)
    return Query(promql.per_second(metric, RATE, (), where), called, shown_unit(metric.unit, per_second=True))


def _never_is_zero(part: Metric, whole: Metric, called: str, by: tuple[str, ...]) -> Query:
    """A counter that is absent until it first counts, as 0 wherever the one beside it is there."""
    there = promql.per_second(whole, RATE, by, queries.where(whole))
    expr = f"{promql.per_second(part, RATE, by, queries.where(part))} or {there} * 0"
    return Query(expr, queries.legend(by, called), shown_unit(part.unit, per_second=True))


def _covered() -> Query:
    """Return the share of finished requests that reconciliation does not report as missing in the log."""
    by = ("model_name", "kind")
    missing = promql.share(
        reconciled.MISSING_IN_LOG, reconciled.ENGINE, _RANGE, by, where=queries.where(reconciled.ENGINE)
    )
    return Query(f"clamp(1 - {missing}, 0, 1)", queries.legend(by), shown_unit(Unit.RATIO))


def _settled_ago() -> Query:
    by = ("model_name",)
    return Query(
        f"time() - {promql.current(reconciled.SETTLED, by, queries.where(reconciled.SETTLED))}",
        queries.legend(by),
        shown_unit(Unit.SECONDS),
    )


def _happened(metric: Metric, *by: str) -> Query:
    """Growth of a counter, as far as it grew."""
    grown = queries.growth(metric, by=by)
    return Query(f"{grown.expr} > 0", grown.legend, grown.unit)


def _sources() -> Query:
    """Return whether each source is read; ABSENT for the GPU of a host that has no driver and never showed one."""
    place, read = (
        queries.where(sidecar.SOURCE_UP),
        promql.series(sidecar.SOURCE_LAST_SUCCESS, queries.where(sidecar.SOURCE_LAST_SUCCESS, _OF_GPU)),
    )
    without = promql.growth(
        sidecar.SOURCE_ERRORS, _RANGE, (*_SOURCE, "kind"), queries.where(sidecar.SOURCE_ERRORS, 'reason="no_driver"')
    )
    never = f"{promql.series(sidecar.SOURCE_UP, (*place, _OF_GPU))} == 0 unless on ({_EACH}) {read}"
    missing = f"({never} and on ({_EACH}) {without} > 0)"
    there = f"min by (source) ({promql.series(sidecar.SOURCE_UP, place)} unless on ({_EACH}) {missing})"
    return queries.shortened(
        Query(f"({there} or max by (source) ({missing}) + {ABSENT:g})", "{{source}}", shown_unit(Unit.FLAG)), "source"
    )


def _failed_readings() -> Query:
    """Every reason has a series from the start, at 0, so that the first failure counts; only those with failures are
    shown."""
    return queries.shortened(_happened(sidecar.SOURCE_ERRORS, "source", "reason"), "source")


def _queue() -> Query:
    size, room = (
        promql.current(metric, ("exporter",), queries.where(metric))
        for metric in (self_monitoring.EXPORT_QUEUE, self_monitoring.EXPORT_QUEUE_CAPACITY)
    )
    return Query(promql.per(size, room), "{{exporter}}", shown_unit(Unit.RATIO))


BOARD = Dashboard(
    slug="monitoring-health",
    title="vLLM / Monitoring health",
    question="Does the monitoring itself work: scrapes, rules, notifications, request log?",
    rows=(
        DashboardRow(
            "",
            (
                Panel(
                    "targets-up",
                    "Targets up, by job",
                    "no when a target of the job did not answer its last scrape. Engines, sidecar, gateway, collector,"
                    " Prometheus, Alertmanager and the lab: every target that showed their series within the last day,"
                    " so that one which is gone is still here. The collector is known by its spans, so it comes with"
                    " the first of them.",
                    "All yes.",
                    "Every curve from that job has a gap, and rules over it are silent. Open the target's address by"
                    " hand, then the runbook.",
                    _targets(UP, ("job",), "1d"),
                    Shape.NUMBER,
                    detail="fleet",
                    height=6,
                ),
                Panel(
                    "sources-up",
                    "Sidecar sources up",
                    "Whether the sidecar's last reading of each source succeeded: the engines' pages, the GPU, the"
                    " request log, the events file. A host without an NVIDIA driver has no GPU to read: not present.",
                    "All yes, or not present.",
                    "Figures from this source stand still or are absent: source errors below say why.",
                    (_sources(),),
                    Shape.NUMBER,
                    height=6,
                ),
                Panel(
                    "records-lost",
                    "Request records lost in this range",
                    "Records of finished requests that the gateway gave up, because the request log could not be"
                    " written for too long. What a crash lost is beside the failed writes below.",
                    "Zero: every figure per team rests on these records.",
                    "Free the disk of the log or fix its permissions; tokens and cost of this range are too low by"
                    " that many requests.",
                    (queries.growth(gateway.LOG_LOST, _RANGE, (), "records"),),
                    Shape.NUMBER,
                    detail="teams",
                    height=6,
                    bad_from=1,
                ),
                Panel(
                    "log-lag",
                    "Request log lag",
                    "How long after its request ended the newest record was counted. It moves only when a record"
                    " arrives.",
                    "A few seconds.",
                    "Figures from the log are that late. If unread bytes grow too, the sidecar cannot keep up; if not,"
                    " nobody asks.",
                    (queries.shortened(queries.worst(sidecar.LOG_LAG, ("path",)), "path"),),
                    threshold=thresholds.LOG_LAG,
                    detail="teams",
                ),
                Panel(
                    "log-against-engine",
                    "Successful requests: log and engine",
                    "Requests per second that ended well, as the request log knows them and as the engines count them,"
                    " all models together. Two lines and not a ratio: the log counts a little later, so that either may"
                    " be ahead for a moment.",
                    "The two lines lie on each other.",
                    "Engine above log: requests pass by the gateway, records are lost, or requests ask for several"
                    " replies (n above 1) or carry several prompts, each of which the engine counts. With one model"
                    " chosen its LoRA adapters do the same: the log has them under their own names, the engine under"
                    " the model's; choose all. Log above engine: an engine is not scraped, or answers come from"
                    " elsewhere.",
                    (
                        _ended(sidecar.REQUESTS, "log", 'outcome="ok"'),
                        _ended(vllm.REQUEST_SUCCESS, "engine", 'finished_reason!~"abort|error"'),
                    ),
                    detail="teams",
                ),
                Panel(
                    "coverage",
                    "Logged share of finished requests",
                    "Of the requests and tokens that the engines finished in this range, the part that the request log"
                    " has or may still get: the rest is sure to be missing in it.",
                    "100 %.",
                    "Figures per team are too low by the rest: see requests missing in the log below, by model and"
                    " cause.",
                    (_covered(),),
                    Shape.NUMBER,
                    detail="teams",
                    height=6,
                    lowest_first=True,
                    optional=_NO_BOOKS,
                ),
                Panel(
                    "firing-alerts",
                    "Firing alerts",
                    "What fires right now. VLLMWatchdog always does: it shows that rules are evaluated.",
                    "VLLMWatchdog and nothing else.",
                    "Open the runbook of the most severe one. If even VLLMWatchdog is missing, no alert of ours can"
                    " fire: load the rules.",
                    (queries.firing(("alertname", "severity", "model_name", "instance"), "Firing"),),
                    Shape.TABLE,
                    detail="overview",
                ),
            ),
        ),
        DashboardRow(
            "Prometheus",
            (
                Panel(
                    "scrape-duration",
                    "Scrape duration, by target",
                    "How long the last scrape of each target took: of engines and of those who watch them, as far as"
                    " they answered in the last hour.",
                    "Far below the scrape interval and its timeout of ten seconds.",
                    "A slow engine page means a busy API server; near the timeout, samples go missing.",
                    _targets(SCRAPE_DURATION, _TARGET, "1h"),
                ),
                Panel(
                    "scrape-samples",
                    "Samples, by target",
                    "Samples that the last scrape of each target brought: of engines and of those who watch them.",
                    "Level.",
                    "Growth without end is a label with unbounded values: look at what the target's page repeats.",
                    _targets(SCRAPE_SAMPLES, _TARGET, "1h"),
                ),
                Panel(
                    "sample-limit",
                    "Samples, share of the limit, by target",
                    "Samples of the last scrape of each target over the sample_limit of its job. Above it the whole"
                    " page is thrown away, and the target counts as down.",
                    "At most half.",
                    "Near the line: what has the page more of than the day before? Many adapters, ranks or teams are"
                    " growth: raise the limit. Labels that nobody ends are a defect: see the page of the alert.",
                    (_near_limit(),),
                    threshold=thresholds.SCRAPE_NEAR_LIMIT,
                    optional=(
                        "Prometheus exposes its limits only when it is started with"
                        " --enable-feature=extra-scrape-metrics, and only of jobs that set sample_limit, as"
                        " stack/deploy/fleet does."
                    ),
                ),
                Panel(
                    "rule-failures",
                    "Rule evaluations failed or missed",
                    "Evaluations of rules that failed, and evaluations that were left out because the one before was"
                    " not done.",
                    "Zero.",
                    "An alert whose rule fails cannot fire: Prometheus shows the error on its page Status, Rules.",
                    (
                        queries.shortened(
                            queries.growth(self_monitoring.RULE_FAILURES, by=("rule_group",), called="failed"),
                            "rule_group",
                        ),
                        queries.shortened(
                            queries.growth(
                                self_monitoring.RULE_ITERATIONS_MISSED, by=("rule_group",), called="left out"
                            ),
                            "rule_group",
                        ),
                    ),
                ),
                Panel(
                    "rule-duration",
                    "Duration of rule groups",
                    "How long the last evaluation of each group took, beside the shortest interval between two.",
                    "Far below the interval.",
                    "Near it, evaluations are left out: fewer series, dearer rules recorded less often, or a larger"
                    " Prometheus.",
                    (
                        queries.shortened(
                            queries.worst(self_monitoring.RULE_GROUP_DURATION, ("rule_group",)), "rule_group"
                        ),
                        queries.now(self_monitoring.RULE_GROUP_INTERVAL, (), "interval"),
                    ),
                ),
                Panel(
                    "alerts-sent",
                    "Alerts not delivered to Alertmanager",
                    "Alerts that Prometheus gave up, and those that one Alertmanager did not take.",
                    "Zero.",
                    "Nobody is notified of firing alerts: check that Alertmanager is up and that its address is in"
                    " Prometheus' configuration.",
                    (
                        queries.growth(self_monitoring.NOTIFICATIONS_DROPPED, by=(), called="given up"),
                        queries.growth(self_monitoring.NOTIFICATIONS_ERRORS, by=("alertmanager",), called="not taken"),
                    ),
                ),
                Panel(
                    "head-series",
                    "Prometheus head series",
                    "Series that Prometheus holds in memory; its own memory follows this number.",
                    "Level, apart from steps when engines restart.",
                    "Growth without end is churn: see samples by target for where it comes from.",
                    (queries.now(self_monitoring.HEAD_SERIES, (), "series"),),
                ),
            ),
            collapsed=True,
        ),
        DashboardRow(
            "Sidecar",
            (
                Panel(
                    "source-age",
                    "Age of the last reading, by source",
                    "Age of the newest successful reading of each source.",
                    "No older than a few readings.",
                    "Older figures are yesterday's news under today's time: see whether the source is up, and why not.",
                    (queries.shortened(queries.worst(sidecar.SOURCE_AGE, ("source",)), "source"),),
                ),
                Panel(
                    "source-errors",
                    "Failed readings, by source and reason",
                    "Readings of a source that failed; a reason is shown while there are such.",
                    "Zero, apart from an engine that restarts.",
                    "The reason names the layer: unreachable and timeout are the network, the rest is what the source"
                    " said. The sidecar's log has more.",
                    (_failed_readings(),),
                    optional=(
                        "No reading failed in this range, or no sidecar is scraped. Run vllm-watch sidecar run to have"
                        " one."
                    ),
                ),
                Panel(
                    "log-unread",
                    "Request log: unread bytes",
                    "Bytes that stand in a request log and have not been counted.",
                    "Zero, or falling.",
                    "Growing: the sidecar cannot keep up or cannot read the file. Its log says which; its processor"
                    " time says whether it is busy.",
                    (queries.shortened(queries.now(sidecar.LOG_BYTES_BEHIND, ("path",)), "path"),),
                    detail="teams",
                ),
                Panel(
                    "log-bad-lines",
                    "Request log: invalid lines",
                    "Lines that were left out of all figures, by reason: no JSON, a field of the wrong type, out of"
                    " range, too long.",
                    "Zero.",
                    "Someone else writes into the log, or writer and reader are of different releases. The sidecar's"
                    " log says what is wrong.",
                    (queries.growth(sidecar.LOG_BAD_LINES, by=("reason",)),),
                    detail="teams",
                ),
            ),
        ),
        DashboardRow(
            "Sidecar: state, log files and spans",
            (
                Panel(
                    "checkpoint",
                    "Sidecar: checkpoint written",
                    "Whether what the sidecar shows of the request log was written to its file of state. Only what is"
                    " safe there is shown, so that no restart takes anything back.",
                    "yes for every sidecar.",
                    "Figures from the log stand still until it can be written again; nothing is lost meanwhile. The"
                    " runbook says what may be in the way.",
                    (queries.now(sidecar.CHECKPOINT_UP, ("instance",)),),
                    Shape.NUMBER,
                    detail="teams",
                    optional=_NO_STATE,
                ),
                Panel(
                    "checkpoint-commits",
                    "Sidecar: checkpoint writes",
                    "How often the state was written, per second. It is written when there is something new to keep.",
                    "Some per second while requests end, none while nobody asks.",
                    "None while bytes of the log wait to be read: it cannot be written, or the disk is very slow.",
                    (queries.rate(sidecar.CHECKPOINT_COMMITS, ("instance",)),),
                    optional=_NO_STATE,
                ),
                Panel(
                    "checkpoint-bytes",
                    "Sidecar: checkpoint size",
                    "Bytes of the file of state: what was counted, and the ids of the last requests, by which lines"
                    " that come twice are known.",
                    "Level; it falls now and then, when the file is begun anew.",
                    "Growth without end is teams or models without end: see requests without a series of their own.",
                    (queries.now(sidecar.CHECKPOINT_BYTES, ("instance",)),),
                    optional=_NO_STATE,
                ),
                Panel(
                    "log-faults",
                    "Request log: file events",
                    "Things that befell a log file, by reason: left out (long, nul, packed), a last line without its"
                    " end (torn), cut with lines unread (cut), gone at a start (gone), changed where it was read"
                    " already (reread), a rotated file that cannot be read (unreadable).",
                    "None, but for torn where a gateway was killed.",
                    "cut: rotate by renaming, or what was not read yet is lost. long and nul: a writer that is no"
                    " gateway, or a disk that was full. packed: leave the newest rotated file uncompressed.",
                    (_happened(sidecar.LOG_FAULTS, "reason"),),
                    detail="teams",
                    optional=(
                        "Nothing happened to a log in this range, or no sidecar is scraped. Run vllm-watch sidecar run"
                        " to have one."
                    ),
                ),
                Panel(
                    "ship-up",
                    "Data set: shipper writes",
                    "Whether the shipper's last write succeeded: to the store of segments and manifests, and to its own"
                    " disk.",
                    "yes for both.",
                    "Requests wait in the shipper's spool and in the log until it can write again; nothing is lost.",
                    (queries.now(ship.SHIP_UP, ("instance", "kind")),),
                    Shape.NUMBER,
                    optional="Only with a data set of request logs: run vllm-watch ship run.",
                ),
                Panel(
                    "dataset-unexplained",
                    "Data set: unexplained difference",
                    "Largest difference between segments, sidecar and engines on the last complete day that no known"
                    " cause explains, in requests or tokens.",
                    "Zero.",
                    "Requests are missing in the data set, or in it twice. The runbook says how to find which.",
                    (queries.now(ship.SHIP_UNEXPLAINED, ("kind", "model_name")),),
                    optional="Only with a data set of request logs: run vllm-watch ship run with `prometheus` set.",
                ),
                Panel(
                    "golden-verdict",
                    "Golden prompts: last verdict",
                    "Whether each engine computed what was recorded when it was last checked, and the cause if not.",
                    "same for every engine.",
                    "different: another release, record anew if it was meant. wrong: see the cause, and take the engine"
                    " out.",
                    (queries.now(golden.GOLDEN_VERDICT, ("address", "model_name", "verdict", "cause")),),
                    Shape.NUMBER,
                    optional=_NO_GOLDEN,
                ),
                Panel(
                    "golden-age",
                    "Golden prompts: age of the last check",
                    "Time since the last complete check of each engine.",
                    "Below the interval of the checks.",
                    "Checks fail, wait for their budget of tokens, or do not run: damage would not be noticed.",
                    (
                        Query(
                            f"time() - {queries.now(golden.GOLDEN_CHECKED, ('address', 'model_name')).expr}",
                            queries.legend(("address", "model_name")),
                            "s",
                        ),
                    ),
                    optional=_NO_GOLDEN,
                ),
                Panel(
                    "golden-difference",
                    "Golden prompts: largest difference",
                    "Largest difference of a prompt token's log-probability from the baseline at the last check, in"
                    " nats.",
                    "0, or within what was learned when the baseline was recorded.",
                    "More without a change is damage. The size alone says little: the verdict compares it with noise.",
                    (queries.now(golden.GOLDEN_DIFFERENCE, ("address", "model_name")),),
                    optional=_NO_GOLDEN,
                ),
                Panel(
                    "log-duplicates",
                    "Request log: duplicate lines",
                    "Lines whose request was counted before. They are recognised by their ids and counted once.",
                    "Zero.",
                    "A log that is forwarded or copied back comes twice. Nothing is counted twice by it; beyond the ids"
                    " that are remembered it would be. If most lines of a log repeat an id, map another field to"
                    " request_id.",
                    (queries.growth(sidecar.LOG_DUPLICATES, by=("path",)),),
                    detail="teams",
                ),
                Panel(
                    "log-ahead",
                    "Request log: records with a future time",
                    "Readings whose newest record ended more than a second after the sidecar's own time.",
                    "Zero.",
                    "The clocks of gateway and sidecar differ: set both by NTP. Until then the lag above shows 0 where"
                    " it should show more.",
                    (queries.growth(sidecar.LOG_AHEAD, by=(), called="readings"),),
                    detail="teams",
                ),
                Panel(
                    "ttft-negative",
                    "TTFT at the client below TTFT in the engine",
                    "Requests whose time to first token was shorter at the gateway than the engine's own figure for it,"
                    " which cannot be.",
                    "None.",
                    "The two measure different things, or a clock jumped: do not trust the panel on what the way adds,"
                    " on the board Gateway.",
                    (queries.growth(sidecar.TTFT_NEGATIVE, by=("model_name",)),),
                    detail="gateway",
                    optional="Only where the engine reports its times: start vLLM with --enable-per-request-metrics.",
                ),
                Panel(
                    "spans-dropped",
                    "Sidecar: spans dropped, by reason",
                    "Spans that never reached the collector: refused by it, or given up while it did not answer and the"
                    " queue was full.",
                    "None.",
                    "The traces of these requests lack the gateway's part. Is the collector up, and does it take what"
                    " is sent? The sidecar's log has its answer.",
                    (queries.growth(sidecar.SPANS_DROPPED, by=("reason",)),),
                    optional=_NO_TRACES,
                ),
                Panel(
                    "spans-sent",
                    "Sidecar: spans sent",
                    "Spans per second that the collector took, and those left out on purpose: sampled, of before the"
                    " start, or without ids.",
                    "As many as requests end, or the share of them that you sample.",
                    "Fewer: see spans that wait. incomplete: the log's writer gives no ids or no times.",
                    (
                        queries.rate(sidecar.SPANS_SENT, (), "sent"),
                        queries.rate(sidecar.SPANS_LEFT_OUT, ("reason",), "left out"),
                    ),
                    optional=_NO_TRACES,
                ),
                Panel(
                    "spans-waiting",
                    "Sidecar: spans queued",
                    "Spans of requests that wait to be sent or are on their way.",
                    "Near zero.",
                    "Growing: the collector does not answer, or is slower than requests end. When the queue is full the"
                    " oldest are lost.",
                    (queries.now(sidecar.SPANS_WAITING, (), "waiting"),),
                    optional=_NO_TRACES,
                ),
            ),
            collapsed=True,
        ),
        DashboardRow(
            "Reconciliation of log and engine",
            (
                Panel(
                    "logged-requests",
                    "Requests finished, by model: log and engine",
                    "Requests per second that the sidecar took from the request log and from the engines' counters,"
                    " counted alike: each of n, each prompt, under the engine's name of the model.",
                    "The two lines of a model lie on each other; the log's comes a moment later.",
                    "Apart for long: see missing and extra in the log beside this, where it is booked as soon as it is"
                    " sure.",
                    tuple(
                        queries.rate(metric, ("model_name",), called, only=_KINDS[0])
                        for called, metric in (("log", reconciled.LOGGED), ("engine", reconciled.ENGINE))
                    ),
                    optional=_NO_BOOKS,
                ),
                Panel(
                    "logged-tokens",
                    "Tokens of finished requests, by model and kind: log and engine",
                    "Tokens per second of prompts and answers, as the request log and as the engines have them.",
                    "The two lines of a model and kind lie on each other.",
                    "Apart while requests agree: records without usage, whose tokens nobody knows; a client's stream"
                    " without usage is one.",
                    tuple(
                        queries.rate(metric, ("model_name", "kind"), called, only=_KINDS[1])
                        for called, metric in (("log", reconciled.LOGGED), ("engine", reconciled.ENGINE))
                    ),
                    optional=_NO_BOOKS,
                ),
                Panel(
                    "missing-in-log",
                    "Missing in the log, by model and cause",
                    "Requests that an engine finished and no log shows, once that is sure, which takes half a minute or"
                    " more.",
                    "Zero.",
                    "unknown: somebody passes by the gateway, or records are lost. The runbook separates the two.",
                    (queries.growth(reconciled.MISSING_IN_LOG, by=("model_name", "cause"), only=_KINDS[0]),),
                    detail="teams",
                    optional=_NO_BOOKS,
                ),
                Panel(
                    "missing-in-log-tokens",
                    "Tokens missing in the log, by kind and cause",
                    "Tokens of finished requests that no log shows, or shows without figures (no_usage).",
                    "Zero.",
                    "no_usage: the engine reported no usage to the gateway, so these tokens are on no team's account."
                    " unknown: see requests beside this.",
                    (queries.growth(reconciled.MISSING_IN_LOG, by=("kind", "cause"), only=_KINDS[1]),),
                    detail="teams",
                    optional=_NO_BOOKS,
                ),
                Panel(
                    "extra-in-log",
                    "Extra in the log, by model and cause",
                    "Requests that a log shows and no engine has counted, once that is sure.",
                    "Zero, apart from restart and start: what an engine finished after it was last looked at, or before"
                    " it was first.",
                    "unknown: an engine that the sidecar does not read, or lines that were written twice under new"
                    " ids.",
                    (queries.growth(reconciled.EXTRA_IN_LOG, by=("model_name", "cause"), only=_KINDS[0]),),
                    detail="teams",
                    optional=_NO_BOOKS,
                ),
                Panel(
                    "books-open",
                    "Open difference, requests",
                    "Engine less log, as far as nobody can tell yet what is on its way and what is missing.",
                    "A few, and back to zero when nobody asks.",
                    "It rises and stays: it will be booked as missing in the log. Below zero while an engine does not"
                    " answer: wait for the engine.",
                    (queries.now(reconciled.OPEN, ("model_name",), only=_KINDS[0]),),
                    optional=_NO_BOOKS,
                ),
                Panel(
                    "books-open-tokens",
                    "Open difference, tokens",
                    "The same for tokens, by kind.",
                    "What the requests that are open account for.",
                    "As for requests.",
                    (queries.now(reconciled.OPEN, ("model_name", "kind"), only=_KINDS[1]),),
                    optional=_NO_BOOKS,
                ),
                Panel(
                    "books-settled",
                    "Reconciled up to, age",
                    "How long ago the newest look at the engines was that has been compared with all that the logs"
                    " could still say about it.",
                    "Half a minute, or twice the time that the longest requests take.",
                    "Growing: an engine does not answer, or the log is not read to its end. Until then nothing is"
                    " booked as extra in the log.",
                    (_settled_ago(),),
                    optional=_NO_BOOKS,
                ),
                Panel(
                    "aborted-tokens",
                    "Tokens of aborted requests",
                    "Tokens per second that went into answers nobody has, by type. It is counted when the engine is"
                    " next idle, so it comes in steps.",
                    "A few.",
                    "Much: clients hang up, and their work is paid for by all; see outcomes on the board Teams.",
                    (queries.rate(reconciled.ABORTED, ("model_name", "type")),),
                    detail="teams",
                    optional=_NO_BOOKS,
                ),
                Panel(
                    "unfinished-tokens",
                    "Tokens in no finished request",
                    "Tokens that an engine has worked on for requests that still run, or were aborted since it was last"
                    " idle, by type.",
                    "It follows the requests that run, and is zero in an idle engine.",
                    "Growth that no running request explains is work for requests that were aborted.",
                    (queries.now(reconciled.UNFINISHED, ("model_name", "type")),),
                    detail="teams",
                    optional=_NO_BOOKS,
                ),
            ),
            collapsed=True,
        ),
        DashboardRow("Gateway", (LOG, LOOP_LAG), collapsed=True),
        DashboardRow(
            "Rejected connections",
            (
                Panel(
                    "turned-away",
                    "Rejected connections by reason",
                    "Requests and connections that gateway and sidecar refused or cut before anybody else looked at"
                    " them.",
                    "Zero, but for handshake where something only tries whether the port is open.",
                    "login, logins_waiting: somebody tries passwords, or a scrape has the wrong one. slow_head,"
                    " gave_way, full: more connections than there is room for, or a client that hangs; a firewall keeps"
                    " them out. pipelined: a client does not wait for its answers. head_too_large, bad_request_line,"
                    " bad_framing: a client that speaks no HTTP/1.1, or a proxy that changes it.",
                    (
                        queries.growth(gateway.LISTENER_REJECTED, by=("listener", "reason"), called="gateway"),
                        queries.growth(sidecar.LISTENER_REJECTED, by=("reason",), called="sidecar"),
                    ),
                ),
            ),
            collapsed=True,
        ),
        DashboardRow(
            "Sidecar: irregular input",
            (
                Panel(
                    "log-untimed",
                    "Request log: lines without a time",
                    "Lines that carry no time of their own; the time they were read stands for it.",
                    "Zero with our gateway; other writers may leave it out.",
                    "Curves from these lines are right only while the log is read as it is written: let the writer"
                    " add ts.",
                    (queries.growth(sidecar.LOG_UNTIMED, by=(), called="lines"),),
                    detail="teams",
                ),
                Panel(
                    "log-rotations",
                    "Request log: rotations",
                    "Times a log was replaced or cut under the reader.",
                    "As often as you rotate it.",
                    "More often than that: two writers, or a log cut in place, which loses what was not read yet.",
                    (queries.shortened(queries.growth(sidecar.LOG_ROTATIONS, by=("path",)), "path"),),
                    detail="teams",
                ),
                Panel(
                    "folded",
                    "Requests beyond the label limit",
                    "Requests counted under __other__, because their team or model came after the table was full.",
                    "Zero.",
                    "Name your teams in the sidecar's settings: those are kept first. Many unknown models are a client"
                    " that guesses names.",
                    (
                        queries.growth(sidecar.TEAMS_OVERFLOW, by=(), called="team"),
                        queries.growth(sidecar.MODELS_OVERFLOW, by=(), called="model"),
                    ),
                    detail="teams",
                ),
                Panel(
                    "unknown-families",
                    "Unknown vLLM series",
                    "Families on an engine's page that this release of vllm-watch does not know.",
                    "Zero.",
                    "The engine is newer than the catalogue: vllm-watch metrics check with its address names them, and"
                    " shows which panels it leaves empty.",
                    (queries.now(sidecar.ENGINE_UNKNOWN_FAMILIES, ("upstream",)),),
                    detail="tuning",
                ),
                Panel(
                    "source-duration",
                    "Reading duration, by source",
                    "Duration of the last reading of each source.",
                    "Far below a second.",
                    "A slow engine page is a busy API server; a slow GPU reading is the driver.",
                    (queries.shortened(queries.worst(sidecar.SOURCE_DURATION, ("source",)), "source"),),
                ),
                Panel(
                    "lab-processes",
                    "Processes of the lab",
                    "Whether each process of the embedded lab runs and answers.",
                    "All yes.",
                    "The lab's page says why a process stopped and shows the end of its log.",
                    (queries.now(sidecar.LAB_PROCESS_UP, ("process",)),),
                    Shape.NUMBER,
                    optional="This stack is not the embedded lab. Start that with make lab to see its processes here.",
                ),
            ),
            collapsed=True,
        ),
        DashboardRow(
            "Prometheus storage and Alertmanager",
            (
                Panel(
                    "samples-refused",
                    "Samples rejected by Prometheus",
                    "Samples with a time that is taken or past, and scrapes thrown away whole because the page was too"
                    " large.",
                    "Zero.",
                    "Taken times mean that two targets have the same labels: look for one engine in two scrape jobs.",
                    (
                        queries.growth(self_monitoring.SAMPLES_DUPLICATE, by=(), called="time is taken"),
                        queries.growth(self_monitoring.SAMPLES_OUT_OF_ORDER, by=(), called="time is past"),
                        queries.growth(self_monitoring.SCRAPES_OVER_LIMIT, by=(), called="page too large"),
                    ),
                ),
                Panel(
                    "samples-stored",
                    "Samples stored",
                    "Samples per second that Prometheus stores.",
                    "Level.",
                    "A fall is a target that went away; a rise is a new one, or a label with too many values.",
                    (queries.rate(self_monitoring.SAMPLES_APPENDED, (), "samples"),),
                ),
                Panel(
                    "config-loaded",
                    "Configuration reloads",
                    "no when the last reading of the configuration failed: the old one is still in use.",
                    "yes for both.",
                    "What you changed is not in effect: promtool check config or amtool check-config says where the"
                    " error is.",
                    (
                        queries.now(self_monitoring.CONFIG_LOADED, (), "Prometheus"),
                        queries.now(self_monitoring.ALERTMANAGER_CONFIG_LOADED, (), "Alertmanager"),
                    ),
                    Shape.NUMBER,
                ),
                Panel(
                    "alertmanagers",
                    "Alertmanagers discovered",
                    "How many Alertmanagers Prometheus sends to.",
                    "As many as you run, and never zero.",
                    "Zero: alerts fire and nobody is notified. Add alerting to Prometheus' configuration.",
                    (queries.now(self_monitoring.ALERTMANAGERS, (), "known"),),
                ),
                Panel(
                    "alertmanager-alerts",
                    "Alertmanager: alerts, by state",
                    "Alerts that Alertmanager holds: active, suppressed by a silence or another alert, or not yet"
                    " looked at.",
                    "As many as fire; VLLMWatchdog is always among them.",
                    "Suppressed and not by you: look for a forgotten silence.",
                    (queries.now(self_monitoring.ALERTMANAGER_ALERTS, ("state",)),),
                    Shape.STACK,
                    detail="overview",
                ),
                Panel(
                    "alertmanager-notifications",
                    "Alertmanager: notifications",
                    "Notifications that Alertmanager tried to send, those that failed, and alerts that it refused as"
                    " malformed.",
                    "None failed, none refused.",
                    "Nobody was notified: Alertmanager's log names the receiver and its answer.",
                    (
                        queries.growth(self_monitoring.ALERTMANAGER_NOTIFICATIONS, by=(), called="tried"),
                        queries.growth(
                            self_monitoring.ALERTMANAGER_NOTIFICATIONS_FAILED, by=("integration",), called="failed"
                        ),
                        queries.growth(self_monitoring.ALERTMANAGER_INVALID, by=(), called="refused"),
                    ),
                ),
            ),
            collapsed=True,
        ),
        DashboardRow(
            "Collector",
            (
                Panel(
                    "spans-in",
                    "Collector: spans accepted and refused",
                    "Spans per second that the collector took, and that it sent back because it was full. It shows no"
                    " count before the first, so the first burst after its start is not in these curves.",
                    "Nothing refused.",
                    "Refused spans are traces with holes: give the collector more memory, or let vLLM sample.",
                    (
                        queries.rate(self_monitoring.SPANS_ACCEPTED, ("receiver",), "taken"),
                        _never_is_zero(
                            self_monitoring.SPANS_REFUSED, self_monitoring.SPANS_ACCEPTED, "refused", ("receiver",)
                        ),
                    ),
                    optional=_NO_SPANS,
                ),
                Panel(
                    "spans-out",
                    "Collector: spans sent and failed",
                    "Spans per second that arrived at the trace store, and that were given up after the last retry. It"
                    " shows no count before the first, so the first burst of either is not in these curves.",
                    "Nothing given up, and as many sent as taken.",
                    "The trace store does not answer or refuses: the collector's log has its answer.",
                    (
                        queries.rate(self_monitoring.SPANS_SENT, ("exporter",), "sent"),
                        _never_is_zero(
                            self_monitoring.SPANS_SEND_FAILED, self_monitoring.SPANS_SENT, "given up", ("exporter",)
                        ),
                    ),
                    optional=_NO_SPANS,
                ),
                Panel(
                    "export-queue",
                    "Collector: queue in use",
                    "Share of the collector's sending queue that is filled with batches.",
                    "Near zero.",
                    "At its end spans are thrown away: the trace store is slower than what comes in.",
                    (_queue(),),
                    optional=(
                        "No exporter of the collector has a sending queue, or the collector is not scraped. Send spans"
                        " to a trace store with otlp_http or otlp_grpc instead of debug."
                    ),
                ),
            ),
            collapsed=True,
        ),
    ),
)
