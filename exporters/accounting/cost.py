"""Usage and cost of teams and models over a period, from Prometheus or from request logs.

Invariant: the total is the sum of the rows. Idle, unattributed and unclaimed aborted work have their own rows.
Aborted work claimed by a record is in its team's row, with a column for its part."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from exporters.accounting.attribution import ABANDONED
from exporters.accounting.busy_hours import HOUR_S, sweep
from exporters.accounting.gpu_use import ABORTED, IDLE, NOBODY, UNATTRIBUTED
from exporters.accounting.prices import Prices
from exporters.catalogue import attributed, gpu, promql, sidecar
from exporters.catalogue.metric import Metric
from exporters.net.prometheus import Address, Prometheus
from exporters.requests.bounded_names import UNKNOWN_MODEL
from exporters.requests.read import BadLines, read_records
from exporters.requests.record import UNKNOWN_TEAM, RequestRecord, ended_at, estimated_tokens

BY = {"team": ("team",), "model": ("model",), "team,model": ("team", "model")}
SHARED = "the split between teams is an estimate; every total is exact"
DEFAULT_SINCE_S = 86_400.0
JOULES_PER_KWH = 3.6e6


@dataclass(slots=True)
class TeamUse:
    """Usage of one model by one team. Seconds of a full GPU; cost in the report's currency.

    aborted_seconds: part of seconds spent on aborted requests. est_...: tokens of requests without usage; not in
    other values."""

    seconds: float = 0.0
    aborted_seconds: float = 0.0
    cost_allocation: float = 0.0
    cost_usage: float = 0.0
    joules: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    completion_tokens: float = 0.0
    est_prompt_tokens: float = 0.0
    est_completion_tokens: float = 0.0
    api_cost: float = 0.0

    def add(self, other: TeamUse) -> None:
        for each in fields(TeamUse):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def tokens(self) -> float:
        return self.prompt_tokens + self.completion_tokens


Uses = defaultdict[tuple[str, str], TeamUse]  # by team and model


@dataclass(slots=True)
class SourceTotals:
    """Totals from one source. known: which of cost, api, joules, estimates it has. notes: assumptions."""

    source: str
    from_s: float
    to_s: float
    currency: str | None = None
    uses: Uses = field(default_factory=lambda: defaultdict(TeamUse))
    known: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=lambda: [SHARED])


def report(found: SourceTotals, by: str = "team,model") -> dict[str, Any]:
    """Return the rows and their total, largest first and unowned ones last; None: not available from the source."""
    names = BY[by]
    rows: Uses = defaultdict(TeamUse)
    for (team, model), use in found.uses.items():
        rows[team if "team" in names else "", model if "model" in names else ""].add(use)
    ordered = sorted(rows.items(), key=lambda row: (row[0][0] in NOBODY, -row[1].seconds, row[0]))
    total = TeamUse()
    for _, use in ordered:
        total.add(use)
    result = [
        {name: {"team": team, "model": model}[name] for name in names} | _figures(use, total, found.known)
        for (team, model), use in ordered
    ]
    return {
        "source": found.source, "from_s": found.from_s, "to_s": found.to_s, "by": by, "currency": found.currency,
        "rows": result, "total": _figures(total, total, found.known), "notes": found.notes,
    }  # fmt: skip


def _figures(use: TeamUse, total: TeamUse, known: set[str]) -> dict[str, float | None]:
    cost, usage = (use.cost_allocation, use.cost_usage) if "cost" in known else (None, None)
    return {
        "gpu_hours": use.seconds / HOUR_S,
        "aborted_gpu_hours": use.aborted_seconds / HOUR_S,
        "share": use.seconds / total.seconds if total.seconds else 0.0,
        "cost_allocation": cost,
        "cost_usage": usage,
        "allocation_per_1k_tokens": _per_1k(cost, use.tokens),
        "usage_per_1k_tokens": _per_1k(usage, use.tokens),
        "joules": use.joules if "joules" in known else None,
        "prompt_tokens": use.prompt_tokens,
        "cached_tokens": use.cached_tokens,
        "completion_tokens": use.completion_tokens,
        "est_prompt_tokens": use.est_prompt_tokens if "estimates" in known else None,
        "est_completion_tokens": use.est_completion_tokens if "estimates" in known else None,
        "api_cost": use.api_cost if "api" in known else None,
    }


def _per_1k(cost: float | None, tokens: float) -> float | None:
    return 1000 * cost / tokens if cost is not None and tokens else None


# ---- from Prometheus


async def from_prometheus(where: Address, since_s: float, now_s: float, prices: Prices | None = None) -> SourceTotals:
    """Return totals by the increase of each recorded series, with resets, summed afterwards.

    With prices, cost is computed from the seconds instead of the recorded cost. Raises ValueError with a sentence."""
    found = SourceTotals(where.shown, now_s - since_s, now_s, known={"joules"})
    async with Prometheus(where) as prometheus:
        if prices:
            await _price_seconds(prometheus, since_s, now_s, prices, found)
        else:
            await _add_recorded_cost(prometheus, since_s, now_s, found)
        async for labels, joules in _grown(prometheus, attributed.TEAM_ENERGY, ("model_name", "team"), since_s, now_s):
            _use(found, labels).joules += joules
        async for labels, tokens in _grown(prometheus, sidecar.TOKENS, ("model_name", "team", "type"), since_s, now_s):
            use, name = _use(found, labels), f"{labels.get('type')}_tokens"
            if name in {each.name for each in fields(TeamUse)}:
                setattr(use, name, getattr(use, name) + tokens)
        async for labels, tokens in _grown(
            prometheus, sidecar.ESTIMATED_TOKENS, ("model_name", "team", "type"), since_s, now_s
        ):
            found.known.add("estimates")
            part = {"prompt": TeamUse(est_prompt_tokens=tokens), "completion": TeamUse(est_completion_tokens=tokens)}
            _use(found, labels).add(part.get(labels.get("type", ""), TeamUse()))
    if prices:
        _at_api_prices(found, prices)
    found.notes.append("increase() in Prometheus extrapolates to the ends of the period, equally for every row")
    return found


def _use(found: SourceTotals, labels: Mapping[str, str]) -> TeamUse:
    return found.uses[labels.get("team", UNATTRIBUTED), labels.get("model_name", UNKNOWN_MODEL)]


async def _grown(prometheus: Prometheus, metric: Metric, by: Sequence[str], since_s: float, now_s: float) -> Any:
    answer = await prometheus.as_of(promql.growth(metric, f"{round(since_s)}s", by), now_s)
    if answer.error:
        raise ValueError(answer.error)
    for one in answer.series:
        if one.value:
            yield one.metric, float(one.value[1])


async def _seconds(prometheus: Prometheus, since_s: float, now_s: float) -> list[tuple[Mapping[str, str], float]]:
    rows = [
        row
        async for row in _grown(prometheus, attributed.TEAM_SECONDS, ("method", "model_name", "team"), since_s, now_s)
    ]
    if not rows:
        raise ValueError(
            f"{prometheus.where.shown} has no {attributed.TEAM_SECONDS.name} in this period: scrape a sidecar that"
            " reads engines and GPUs. With the request log only: vllm-watch cost --log FILE"
        )
    return rows


def _aborted(labels: Mapping[str, str], seconds: float) -> float:
    """Return the part of a series' seconds spent on aborted requests."""
    return seconds if labels.get("method") == ABANDONED or labels.get("team") == ABORTED else 0.0


async def _add_recorded_cost(prometheus: Prometheus, since_s: float, now_s: float, found: SourceTotals) -> None:
    for labels, seconds in await _seconds(prometheus, since_s, now_s):
        _use(found, labels).add(TeamUse(seconds=seconds, aborted_seconds=_aborted(labels, seconds)))
    currencies = set()
    async for labels, cost in _grown(
        prometheus, attributed.COST, ("basis", "currency", "model_name", "team"), since_s, now_s
    ):
        currencies.add(labels.get("currency", ""))
        use = _use(found, labels)
        if labels.get("basis") == "usage":
            use.cost_usage += cost
        else:
            use.cost_allocation += cost
        found.known.add("cost")
    async for labels, cost in _grown(
        prometheus, attributed.API_COST, ("currency", "model_name", "team"), since_s, now_s
    ):
        currencies.add(labels.get("currency", ""))
        _use(found, labels).api_cost += cost
        found.known.add("api")
    if len(currencies) > 1:
        raise ValueError(
            f"cost was recorded in {' and '.join(sorted(currencies))} within this time; name one --prices FILE, or a"
            " shorter --since"
        )
    found.currency = currencies.pop() if currencies else None
    if not found.currency:
        found.notes.append(
            "no cost was recorded: the sidecar has no `prices`; --prices FILE computes it from the seconds"
        )


async def _price_seconds(
    prometheus: Prometheus, since_s: float, now_s: float, prices: Prices, found: SourceTotals
) -> None:
    """Compute cost at these prices: GPUs of a model at their own price, its teams at the mean."""
    answer = await prometheus.as_of(promql.last_samples(gpu.INFO, f"{round(since_s)}s"), now_s)
    names = {one.metric.get("uuid", ""): one.metric.get("name") for one in answer.series}
    held: dict[str, float] = defaultdict(float)
    worth: dict[str, float] = defaultdict(float)
    async for labels, seconds in _grown(prometheus, attributed.ALLOCATED, ("model_name", "uuid"), since_s, now_s):
        model = labels.get("model_name", "")
        held[model] += seconds
        worth[model] += seconds / HOUR_S * prices.per_hour(names.get(labels.get("uuid", "")))
    for labels, seconds in await _seconds(prometheus, since_s, now_s):
        model = labels.get("model_name", "")
        price = worth[model] / held[model] if held[model] else prices.per_hour(None) / HOUR_S
        busy = labels.get("team") != IDLE and labels.get("method") != "unknown"
        aborted = _aborted(labels, seconds)
        _use(found, labels).add(
            TeamUse(
                seconds=seconds,
                aborted_seconds=aborted,
                cost_allocation=seconds * price,
                cost_usage=seconds * price * busy,
            )
        )
    found.currency = prices.currency
    found.known.add("cost")
    found.notes.append(
        "cost uses the prices of the file, not those of each moment; a MIG instance costs its share of a GPU"
    )
    if prices.spread_idle:
        _spread_idle(found)


# ---- from request logs


@dataclass(slots=True)
class CostLog:
    """Cost data of request logs.

    spans: start, end, and team with aborted flag, by model and hour; tokens: by team and model."""

    spans: defaultdict[tuple[str, int], list[tuple[float, float, tuple[str, bool]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    tokens: Uses = field(default_factory=lambda: defaultdict(TeamUse))
    first_s: float = float("inf")
    last_s: float = float("-inf")
    untimed: int = 0
    bad: BadLines = field(default_factory=BadLines)

    def add(self, record: RequestRecord, from_s: float, to_s: float) -> None:
        """Add a record that ran within the period.

        Rejected requests used nothing; aborted ones count for their team."""
        end_s = ended_at(record)
        if record.outcome == "rejected":
            return
        if end_s is None or record.e2e_ms is None:
            self.untimed += 1
            return
        start_s = end_s - max(0.0, record.e2e_ms - (record.queue_ms or 0.0)) / 1000
        if end_s < from_s or start_s > to_s:
            return
        team, model = record.team or UNKNOWN_TEAM, record.model or UNKNOWN_MODEL
        broke_off = record.outcome not in ("ok", None)
        for hour in range(int(max(start_s, from_s) // HOUR_S), int(min(end_s, to_s) // HOUR_S) + 1):
            self.spans[model, hour].append((start_s, end_s, (team, broke_off)))
        if end_s <= to_s:
            result = record.prompt_tokens, record.cached_tokens, record.completion_tokens, *estimated_tokens(record)
            names = "prompt_tokens", "cached_tokens", "completion_tokens", "est_prompt_tokens", "est_completion_tokens"
            self.tokens[team, model].add(
                TeamUse(**{name: float(tokens or 0) for name, tokens in zip(names, result, strict=True)})
            )
        self.first_s, self.last_s = min(self.first_s, start_s), max(self.last_s, end_s)


def from_log(
    paths: Sequence[Path],
    since_s: float | None,
    now_s: float,
    prices: Prices | None = None,
    gpus: Mapping[str, float] | None = None,
) -> SourceTotals:
    """Return totals by running requests. gpus: number per model, "" for others; one by default.

    Without since_s the period is that of the log, without idle, because the log does not cover allocated time.
    Raises ValueError, OSError."""
    if len({path.resolve() for path in paths}) != len(paths):
        raise ValueError("--log lists a file twice; it would be counted twice")
    from_s, to_s = (float("-inf"), float("inf")) if since_s is None else (now_s - since_s, now_s)
    log = CostLog()
    for record in read_records(paths, log.bad):
        log.add(record, from_s, to_s)
    if not log.spans:
        since = "" if since_s is None else " in this period; use a longer --since, or none"
        raise ValueError(f"{paths[0]} holds no request with a time (ts and e2e_ms){since}; {log.bad.total} bad lines")
    from_s, to_s = (log.first_s, log.last_s) if since_s is None else (from_s, to_s)
    found = SourceTotals(", ".join(map(str, paths)), from_s, to_s, known={"estimates"})
    count = {"": 1.0, **(gpus or {})}
    busy: dict[str, float] = defaultdict(float)
    for (model, hour), spans in log.spans.items():
        for (team, broke_off), seconds in sweep(
            spans, (max(hour * HOUR_S, from_s), min((hour + 1) * HOUR_S, to_s))
        ).items():
            gpu_seconds = seconds * count.get(model, count[""])
            found.uses[team, model].add(TeamUse(seconds=gpu_seconds, aborted_seconds=gpu_seconds * broke_off))
            busy[model] += seconds
    for (team, model), tokens in log.tokens.items():
        found.uses[team, model].add(tokens)
    for model, seconds in busy.items():
        if since_s is not None:
            found.uses[IDLE, model].seconds += max(0.0, to_s - from_s - seconds) * count.get(model, count[""])
    if prices:
        _at_prices(found, prices)
    found.notes += _log_notes(log, count, since_s, prices)
    return found


def _at_prices(found: SourceTotals, prices: Prices) -> None:
    for (team, _), use in found.uses.items():
        use.cost_allocation = use.seconds / HOUR_S * prices.per_hour(None)
        use.cost_usage = 0.0 if team == IDLE else use.cost_allocation
    found.currency = prices.currency
    found.known.add("cost")
    if prices.spread_idle:
        _spread_idle(found)
    _at_api_prices(found, prices)


def _spread_idle(found: SourceTotals) -> None:
    """Spread idle cost over the users of a model, by usage."""
    for (team, model), idle in list(found.uses.items()):
        users = [use for (other, of), use in found.uses.items() if of == model and other != IDLE and use.cost_usage > 0]
        if team == IDLE and users:
            total = sum(use.cost_usage for use in users)
            for use in users:
                use.cost_allocation += idle.cost_allocation * use.cost_usage / total
            idle.cost_allocation = 0.0
    found.notes.append("idle cost is spread over the users of the model (spread_idle)")


def _at_api_prices(found: SourceTotals, prices: Prices) -> None:
    for (team, model), use in found.uses.items():
        if team not in NOBODY and (price := prices.api_price(model)):
            prompt, completion = (
                use.prompt_tokens + use.est_prompt_tokens,
                use.completion_tokens + use.est_completion_tokens,
            )
            use.api_cost = price.cost(prompt, use.cached_tokens, completion)
            found.known.add("api")


def _log_notes(log: CostLog, count: Mapping[str, float], since_s: float | None, prices: Prices | None) -> Iterator[str]:
    result = ", ".join(
        f"{gpus:g} for {model}" if model else f"{gpus:g} for each {'other ' * (len(count) > 1)}model"
        for model, gpus in count.items()
    )
    yield (
        f"GPUs are assumed, not measured (--gpus): {result}; all of a model's count as busy while any of its"
        " requests runs"
    )
    yield ("a request runs from leaving the gateway's queue to its end; an aborted one counts for its team")
    if since_s is None:
        yield "no idle time: the log does not cover allocated time; set --since"
    if prices and prices.gpus:
        yield "the log does not name the GPUs: each costs the default gpu_hour"
    if log.untimed:
        yield f"{log.untimed} requests without ts or e2e_ms are not included"
    if log.bad.total:
        yield f"{log.bad.total} lines are no request records"


def parse_gpus(given: Iterable[str]) -> dict[str, float]:
    """Parse --gpus: a number for each model, or MODEL=N. Raises ValueError."""
    found = {}
    for text in given:
        model, _, number = text.rpartition("=")
        try:
            found[model] = float(number)
        except ValueError:
            found[model] = 0.0
        if not 0 < found[model] < float("inf"):
            raise ValueError(f"--gpus {text!r} is no number of GPUs; write it like 4 or chat=4")
    return found


def compute_report(
    url: Address | None,
    logs: Sequence[Path],
    since_s: float | None,
    now_s: float,
    prices: Prices | None,
    gpus: Iterable[str],
    by: str,
) -> dict[str, Any]:
    """Return the report of the command. Raises ValueError or OSError with a sentence."""
    if url:
        found = asyncio.run(from_prometheus(url, since_s or DEFAULT_SINCE_S, now_s, prices))
    else:
        found = from_log(logs, since_s, now_s, prices, parse_gpus(gpus))
    return report(found, by)
