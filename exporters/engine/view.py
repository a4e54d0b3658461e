"""Engine facts that PromQL cannot read from /metrics: values in labels, and changes since the last scrape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from exporters.catalogue import exposition_parser, sidecar, vllm
from exporters.catalogue.metric import Metric
from exporters.events.log import TuningEvent
from exporters.exposition import Sample

_GROWING = (vllm.PROMPT_TOKENS, vllm.GENERATION_TOKENS, vllm.REQUEST_SUCCESS)
_SUMS = (
    vllm.REQUEST_PROMPT_TOKENS, vllm.REQUEST_GENERATION_TOKENS, vllm.REQUEST_PREFILL_TIME, vllm.REQUEST_DECODE_TIME,
    vllm.REQUEST_INFERENCE_TIME, vllm.E2E_REQUEST_LATENCY,
)  # fmt: skip
_CONFIGURATION = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization")
SAME_BLOCKS = 0.01
_KNOWN = frozenset(metric.name for metric in (*vllm.VLLM, *vllm.RETIRED))


@dataclass(frozen=True, slots=True)
class CoreCache:
    """KV cache of one engine core (a data-parallel rank). Unknown values are None."""

    engine: str
    model_name: str
    blocks: int | None
    block_size_tokens: int | None
    capacity_tokens: int | None
    configuration: Mapping[str, str]


class EngineTotals(NamedTuple):
    """Counters of one engine core and model since its process started; values not exposed are 0.

    The first three increase when a request finishes, the next three while it runs, the seconds when it finishes.
    Aborted requests are in the middle ones only. cached_tokens: part of prompt_tokens."""

    requests: int = 0
    request_prompt_tokens: int = 0
    request_completion_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    inference_s: float = 0.0
    e2e_s: float = 0.0

    def since(self, before: EngineTotals | None) -> EngineTotals:
        """Return the increase since an earlier scrape; None: all of it, as after a restart."""
        return (
            self if before is None else EngineTotals._make(now - then for now, then in zip(self, before, strict=True))
        )

    def plus(self, other: EngineTotals) -> EngineTotals:
        return EngineTotals._make(a + b for a, b in zip(self, other, strict=True))

    def fell(self, before: EngineTotals) -> bool:
        """Return True if any counter decreased, which only a restart does."""
        return any(now < then for now, then in zip(self[:5], before[:5], strict=True))


class EngineCore(NamedTuple):
    """One engine core (a data-parallel rank) and model. running, waiting: current requests."""

    totals: EngineTotals
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class EngineView:
    """State of an engine at one scrape.

    started_s: unix seconds, None if not exposed (several API processes). cores: by the engine's model_name and
    engine label."""

    version: str | None
    started_s: float | None
    growing: Mapping[tuple[Any, ...], float]  # by series: a removed series is not a decrease
    caches: tuple[CoreCache, ...]
    unknown_families: tuple[str, ...] = ()
    cores: Mapping[tuple[str, str], EngineCore] = field(default_factory=dict)


def parse(
    text: str,
    version: str | None = None,
    reader: Callable[[str], exposition_parser.Exposition] = exposition_parser.parse,
) -> EngineView:
    """Parse a scrape into an EngineView.

    reader: `parse` of an exposition_parser.Parser kept for this engine is faster. Raises BadExposition."""
    return view(reader(text), version)


def view(found: exposition_parser.Exposition, version: str | None = None) -> EngineView:
    """Return the EngineView of a parsed exposition."""
    growing = {(m.name, *sorted(labels.items())): value for m in _GROWING for labels, value in found.of(m.name)}
    return EngineView(
        version=version,
        started_s=found.total(vllm.PROCESS_START_TIME.name),
        growing=growing,
        caches=tuple({cache.engine: cache for cache in _caches(found)}.values()),
        unknown_families=tuple(sorted(f for f in found.families() if f.startswith("vllm:") and f not in _KNOWN)),
        cores=_cores(found),
    )


def _cores(found: exposition_parser.Exposition) -> dict[tuple[str, str], EngineCore]:
    """Return engine cores by model and rank. Several API processes may each expose a part of a core's totals."""
    values: dict[tuple[str, str], dict[str, float]] = {}
    shown = (*_GROWING, vllm.NUM_REQUESTS_RUNNING, vllm.NUM_REQUESTS_WAITING, vllm.PROMPT_TOKENS_CACHED)
    for sample in (*(metric.name for metric in shown), *(f"{metric.name}_sum" for metric in _SUMS)):
        for labels, value in found.of(sample):
            if value == value:  # not NaN
                values.setdefault((labels.get("model_name", ""), labels.get("engine", "")), defaultdict(float))[
                    sample
                ] += value
    return {key: _core(sums) for key, sums in values.items()}


def _core(sums: Mapping[str, float]) -> EngineCore:
    prompt, completion, prefill_s, decode_s, inference_s, e2e_s = (sums[f"{metric.name}_sum"] for metric in _SUMS)
    totals = EngineTotals(
        requests=round(sums[vllm.REQUEST_SUCCESS.name]),
        request_prompt_tokens=round(prompt),
        request_completion_tokens=round(completion),
        prompt_tokens=round(sums[vllm.PROMPT_TOKENS.name]),
        completion_tokens=round(sums[vllm.GENERATION_TOKENS.name]),
        cached_tokens=round(sums[vllm.PROMPT_TOKENS_CACHED.name]),
        prefill_s=prefill_s,
        decode_s=decode_s,
        inference_s=inference_s,
        e2e_s=e2e_s,
    )
    return EngineCore(
        totals, running=round(sums[vllm.NUM_REQUESTS_RUNNING.name]), waiting=round(sums[vllm.NUM_REQUESTS_WAITING.name])
    )


def _caches(found: exposition_parser.Exposition) -> Iterator[CoreCache]:
    models = {
        labels.get("engine", ""): labels.get("model_name", "") for labels, _ in found.of(vllm.NUM_REQUESTS_RUNNING.name)
    }
    for labels, _ in found.of(vllm.CACHE_CONFIG_INFO.name):
        engine = labels.get("engine", "")
        blocks, size = _parse_int(labels.get("num_gpu_blocks")), _parse_int(labels.get("block_size"))
        reported_tokens = _parse_int(labels.get("kv_cache_size_tokens"))
        yield CoreCache(
            engine=engine,
            model_name=models.get(engine, ""),
            blocks=blocks,
            block_size_tokens=size,
            capacity_tokens=reported_tokens
            if reported_tokens is not None
            else blocks * size
            if blocks and size
            else None,
            configuration={name: labels[name] for name in _CONFIGURATION if name in labels},
        )


def _parse_int(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


@dataclass(slots=True)
class History:
    """State of one engine over time: counts restarts and changes, and returns them as events."""

    upstream: str
    last: EngineView | None = None
    restarts: int = 0
    changes: int = 0

    def observe(self, view: EngineView, now_s: float) -> list[TuningEvent]:
        """Record a scrape; return the changes since the last one as events at now_s (unix seconds)."""
        before = self.last
        if before and view.version is None:  # /version did not respond this time
            view = replace(view, version=before.version)
        self.last = view
        if before is None:
            return []
        events = []
        if restarted(before, view):
            self.restarts += 1
            events.append(
                TuningEvent(
                    at_s=view.started_s or now_s,
                    kind="restart",
                    what=f"{self.upstream} restarted",
                    upstream=self.upstream,
                )
            )
        if view.version and before.version and view.version != before.version:
            self.changes += 1
            diff = {"version": (before.version, view.version)}
            what = f"{self.upstream} went from vLLM {before.version} to {view.version}"
            events.append(TuningEvent(at_s=now_s, kind="version", what=what, upstream=self.upstream, diff=diff))
        changed = dict(_differences(before, view))
        if changed:
            self.changes += 1
            what = f"{self.upstream} changed {', '.join(sorted(changed))}"
            events.append(TuningEvent(at_s=now_s, kind="config", what=what, upstream=self.upstream, diff=changed))
        return events

    def samples(self) -> Iterator[Sample]:
        yield sidecar.ENGINE_RESTARTS, {"upstream": self.upstream}, self.restarts
        yield sidecar.ENGINE_CHANGES, {"upstream": self.upstream}, self.changes
        if self.last is None:
            return
        yield sidecar.ENGINE_UNKNOWN_FAMILIES, {"upstream": self.upstream}, len(self.last.unknown_families)
        first = self.last.caches[0].configuration if self.last.caches else {}
        about = {name: first.get(name, "") for name in ("cache_dtype", "enable_prefix_caching")}
        yield sidecar.ENGINE_INFO, {"upstream": self.upstream, "version": self.last.version or "", **about}, 1
        for cache in self.last.caches:
            labels = {"engine": cache.engine, "model_name": cache.model_name, "upstream": self.upstream}
            values: tuple[tuple[Metric, int | None], ...] = (
                (sidecar.KV_BLOCKS, cache.blocks),
                (sidecar.KV_BLOCK_SIZE, cache.block_size_tokens),
                (sidecar.KV_CAPACITY, cache.capacity_tokens),
            )
            yield from ((metric, labels, value) for metric, value in values if value is not None)


def restarted(before: EngineView, after: EngineView) -> bool:
    """Return True for a newer start time, or without start times for a decreased counter."""
    if before.started_s is not None and after.started_s is not None:
        return after.started_s > before.started_s + 1
    return any(after.growing[name] < value for name, value in before.growing.items() if name in after.growing) or any(
        after.cores[key].totals.fell(core.totals) for key, core in before.cores.items() if key in after.cores
    )


def growth(before: EngineView, after: EngineView) -> dict[str, EngineTotals]:
    """Return the increase of an engine's counters between two scrapes, by model, summed over cores.

    A restart counts from 0."""
    is_restarted = restarted(before, after)
    found: dict[str, EngineTotals] = {}
    for (model, rank), core in after.cores.items():
        then = before.cores.get((model, rank))
        grown = core.totals.since(None if is_restarted or then is None else then.totals)
        found[model] = found.get(model, EngineTotals()).plus(grown)
    return found


def _differences(before: EngineView, after: EngineView) -> Iterator[tuple[str, tuple[str | None, str | None]]]:
    """Yield configuration changes of cores in both scrapes; options that differ between cores are reported once."""
    old = {cache.engine: cache.configuration for cache in before.caches}
    for cache in after.caches:
        was = old.get(cache.engine, cache.configuration)
        for name in sorted(set(was) | set(cache.configuration)):
            if not _alike(name, was.get(name), cache.configuration.get(name)):
                yield name, (was.get(name), cache.configuration.get(name))


def _alike(name: str, old: str | None, new: str | None) -> bool:
    """Return True if an option is unchanged. The number of GPU blocks may vary slightly between starts."""
    if name != "num_gpu_blocks" or not (old and new and old.isdecimal() and new.isdecimal()):
        return old == new
    return abs(int(old) - int(new)) <= SAME_BLOCKS * max(int(old), int(new))
