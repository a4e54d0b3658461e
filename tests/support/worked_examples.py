"""The worked examples of docs/reference/joined-metrics.md, and the code of the product that computes each of them
again.

An example is a block of YAML that begins with `example:`; what stands under `given` goes in, what stands under `gives`
has to come out."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from exporters.accounting import cost
from exporters.accounting.attribution import Attribution
from exporters.accounting.billing_period import BillingPeriod
from exporters.accounting.busy_hours import sweep
from exporters.accounting.cost_from_log import from_log
from exporters.accounting.gpu_use import GpuShare, PhaseTimes, UsageSample, mig_fraction, split_energy
from exporters.accounting.prices import Prices
from exporters.accounting.reconciliation import Reconciler
from exporters.catalogue import attributed, reconciled, sidecar
from exporters.catalogue.metric import Metric
from exporters.engine.view import EngineCore, EngineTotals, EngineView
from exporters.exposition import Distribution
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counters import RequestCounters
from exporters.requests.record import RequestRecord, timestamp, to_line
from exporters.requests.work import FinishedRequest, Work
from stack.bench.measurements import met
from stack.bench.workload import Slo
from stack.capacity.kv import LayerBlock, Serving
from stack.gateway.ids import Trace
from stack.gateway.request_state import RequestState, record
from stack.gateway.sse import Scanner

Given = Mapping[str, Any]
_BLOCK = re.compile(r"^```yaml\n(example:.*?)^```", re.DOTALL | re.MULTILINE)
T0 = 1_760_000_400.0


def examples(text: str) -> Iterator[tuple[str, Given, Given]]:
    """Name, what is given, and what comes out, of each example of a page."""
    for block in _BLOCK.findall(text):
        read = yaml.safe_load(block)
        yield read["example"], read.get("given") or {}, read["gives"]


def clocks(given: Given) -> dict[str, Any]:
    """The times of one streamed answer, as the gateway writes them down."""
    x = RequestState(
        request_id="r", trace=Trace("0" * 32, "0" * 16, "01"), route="/v1/completions", accepted=given["accepted_s"]
    )
    x.queued_s, x.stream, x.content_events = given["admitted_s"] - given["accepted_s"], True, given["chunks"]
    scanner = Scanner()
    scanner.first_content, scanner.last_content = given["first_content_s"], given["last_content_s"]
    scanner.content_events = given["chunks"]
    x.first_token, x.token_s = scanner.first_token, scanner.token_s(given["completion_tokens"])
    x.reply.completion_tokens = given["completion_tokens"]
    line = record(x, given["ended_s"], T0)
    return {name: getattr(line, name) for name in ("queue_ms", "ttft_ms", "tpot_ms", "e2e_ms")}


def _traffic(records: list[Given]) -> dict[str, float]:
    """What the sidecar shows of records, by family; of a histogram its count and sum; with an outcome, kind or result,
    by that."""
    traffic = RequestCounters(BoundedNames(), BoundedNames())
    traffic.add_all(
        [
            RequestRecord(**{"request_id": f"r{at}", "team": "a", "model": "m", **each})
            for at, each in enumerate(records)
        ]
    )
    found: dict[str, float] = {}
    for metric, labels, value in traffic.samples():
        which = next((labels[name] for name in ("outcome", "type", "result") if name in labels), "")
        if isinstance(value, Distribution):
            found[f"{metric.name}_count"], found[f"{metric.name}_sum"] = sum(value.counts), value.sum
        else:
            found[f"{metric.name} {which}".strip()] = value
    return found


def mean(shown: Mapping[str, float], metric: Metric) -> float:
    return shown[f"{metric.name}_sum"] / shown[f"{metric.name}_count"]


def overhead(given: Given) -> dict[str, Any]:
    shown = _traffic(given["records"])
    counted, negative = shown[f"{sidecar.TTFT_OVERHEAD.name}_count"], shown[sidecar.TTFT_NEGATIVE.name]
    return {"mean_s": mean(shown, sidecar.TTFT_OVERHEAD), "counted": counted, "negative": negative}


def queues(given: Given) -> dict[str, Any]:
    shown = _traffic(given["records"])
    return {
        "gateway_mean_s": mean(shown, sidecar.QUEUE),
        "engine_mean_s": mean(shown, sidecar.ENGINE_QUEUE),
        "ttft_mean_s": mean(shown, sidecar.TTFT),
    }


def hits(given: Given) -> dict[str, Any]:
    shown = _traffic(given["records"])
    tokens, lookups = sidecar.TOKENS.name, sidecar.CACHE_LOOKUPS.name
    return {
        "of_tokens": shown[f"{tokens} cached"] / shown[f"{tokens} prompt"],
        "of_requests": shown[f"{lookups} hit"] / (shown[f"{lookups} hit"] + shown[f"{lookups} miss"]),
        "reusable_tokens": given["shared_prefix_tokens"] // given["block_tokens"] * given["block_tokens"],
        "blocks_of_prompt": LayerBlock("full", given["block_tokens"], 1.0).blocks(
            given["prompt_tokens"], Serving(max_model_len=8192, block_size=given["block_tokens"])),
    }  # fmt: skip


def outcomes(given: Given) -> dict[str, Any]:
    shown = _traffic([{"outcome": outcome} for outcome, count in given["outcomes"].items() for _ in range(count)])
    failing = re.compile(re.search(r'"(.*)"', sidecar.FAILED[0])[1])  # the matcher of the panel and of the alert
    counts = {
        name.removeprefix(f"{sidecar.REQUESTS.name} "): value
        for name, value in shown.items()
        if name.startswith(f"{sidecar.REQUESTS.name} ")
    }
    whole = sum(counts.values())
    failed = sum(count for outcome, count in counts.items() if failing.fullmatch(outcome))
    return {
        "error_ratio": failed / whole,
        "rejection_ratio": counts["rejected"] / whole,
        "hangup_ratio": counts["client_abort"] / whole,
    }


def books(given: Given) -> dict[str, Any]:
    """An engine that was looked at twice, and a log of which all lines have come; long after, everything is sure."""
    reconciler = Reconciler(upstreams=("e",))
    for at_s, seen in ((T0, given["at_first_look"]), (T0 + 60, given["at_last_look"])):
        log = {"m": FinishedRequest(*seen["log"])}
        requests, prompt, completion = seen["engine"]
        totals = EngineTotals(requests=requests, request_prompt_tokens=prompt, request_completion_tokens=completion)
        reconciler.settle(at_s - 0.1, log, at_end=True)
        reconciler.look("e", EngineView(None, T0 - 50, {}, (), cores={("m", "0"): EngineCore(totals, 0, 0)}), at_s, log)
        for after_s in (0.1, 2.0, 40.0):
            reconciler.settle(at_s + after_s, log, at_end=True)
    shown: dict[str, list[float]] = {}
    names = {
        reconciled.LOGGED: "logged",
        reconciled.ENGINE: "engine",
        reconciled.OPEN: "open",
        reconciled.MISSING_IN_LOG: "missing_in_log",
        reconciled.EXTRA_IN_LOG: "extra_in_log",
    }
    kinds = ("requests", "prompt", "completion")
    for metric, labels, value in reconciler.samples():
        if metric in names:
            assert isinstance(value, (int, float))
            shown.setdefault(names[metric], [0, 0, 0])[kinds.index(labels["kind"])] += value
    return dict(shown)


def _attributed(given: Given, prices: Given | None = None) -> Attribution:
    attribution = Attribution(Prices(**prices) if prices else None)
    start = UsageSample("e", "m", T0, T0, None, given["running"][0], logged={team: Work() for team in given["ended"]})
    attribution.advance(start)
    ended = {team: Work(*tokens) for team, tokens in given["ended"].items()}
    produced = Work(*(sum(column) for column in zip(*given["ended"].values(), strict=True)))
    if "in_flight" in given:
        produced = produced.plus(Work(*given["in_flight"]))
    gpu = GpuShare("GPU-1", fraction=given.get("fraction", 1.0), joules=given.get("joules"))
    attribution.advance(
        UsageSample(
            "e",
            "m",
            T0,
            T0 + given["length_s"],
            given["running"][0],
            given["running"][1],
            produced=produced,
            logged=ended,
            gpus=(gpu,),
        )
    )
    return attribution


def _by_team(attribution: Attribution, metric: Metric, **where: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for sample, labels, value in attribution.samples():
        if sample is metric and where.items() <= labels.items():
            assert isinstance(value, (int, float))
            found[labels["team"]] = found.get(labels["team"], 0.0) + value
    return {team: value for team, value in found.items() if value or not team.startswith("__")}


def gpu_seconds(given: Given) -> dict[str, Any]:
    attribution = _attributed(given)
    pending = next(value for metric, _, value in attribution.samples() if metric is attributed.PENDING)
    return {"seconds": _by_team(attribution, attributed.TEAM_SECONDS), "pending": pending}


def joules(given: Given) -> dict[str, Any]:
    return {"joules": _by_team(_attributed(given), attributed.TEAM_ENERGY)}


def two_bases(given: Given) -> dict[str, Any]:
    attribution = _attributed(given, {"gpu_hour": given["gpu_hour"]})
    return {basis: _by_team(attribution, attributed.COST, basis=basis) for basis in ("allocation", "usage")}


def decode_weight(given: Given) -> dict[str, Any]:
    evidence = PhaseTimes(
        given["decode_s"], given["prefill_s"], given["generated_tokens"], given["computed_prompt_tokens"]
    )
    return {"b": evidence.decode_weight}


def running_at_each_moment(given: Given) -> dict[str, Any]:
    return {"seconds": sweep([tuple(each) for each in given["requests"]], tuple(given["window"]))}


def from_the_log(given: Given) -> dict[str, Any]:
    lines = [
        RequestRecord(
            request_id=f"r{at}",
            ts=timestamp(T0 + each["to_s"]),
            team=each["team"],
            model="m",
            outcome=each.get("outcome", "ok"),
            e2e_ms=(each["to_s"] - each["from_s"]) * 1000,
            prompt_tokens=each["prompt"],
            completion_tokens=each["completion"],
        )
        for at, each in enumerate(given["requests"])
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        path.write_bytes(b"".join(map(to_line, lines)))
        end_s = T0 + given["until_s"]
        period = BillingPeriod(end_s - given["since_s"], end_s)
        found = from_log([path], period, Prices(gpu_hour=given["gpu_hour"]), {"": given["gpus"]})
    told = cost.report(found, "team")
    rows = {row["team"]: row for row in told["rows"]}
    return {
        "seconds": {team: row["gpu_hours"] * 3600 for team, row in rows.items()},
        "per_1k": {team: row["usage_per_1k_tokens"] for team, row in rows.items() if row["usage_per_1k_tokens"]},
        "total_allocation": told["total"]["cost_allocation"], "total_usage": told["total"]["cost_usage"],
    }  # fmt: skip


def slices(given: Given) -> dict[str, Any]:
    fractions = {profile: mig_fraction(profile) for profile in given["activity"]}
    split = split_energy(
        given["joules"], {profile: (fractions[profile], active) for profile, active in given["activity"].items()}
    )
    return {"fractions": fractions, "joules": {profile: joules for profile, (joules, _) in split.items()}}


def goodput(given: Given) -> dict[str, Any]:
    slo = Slo(**given["slo"])
    good = sum(met(slo, RequestRecord(request_id="r", **each)) for each in given["answers"])
    return {"good": good, "goodput_qps": good / given["seconds"]}


COMPUTED: Mapping[str, Callable[[Given], dict[str, Any]]] = {
    "clocks": clocks, "overhead": overhead, "queues": queues, "hits": hits, "outcomes": outcomes, "books": books,
    "gpu-seconds": gpu_seconds,
    "joules": joules, "two-bases": two_bases, "decode-weight": decode_weight,
    "running-at-each-moment": running_at_each_moment,
    "from-the-log": from_the_log, "slices": slices, "goodput": goodput,
}  # fmt: skip
