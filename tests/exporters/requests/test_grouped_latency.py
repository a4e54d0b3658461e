"""Latency by LoRA adapter and by route: few series, no series without adapters, and the same after a restart."""

from __future__ import annotations

from collections.abc import Iterable

from exporters.catalogue import bounds, sidecar
from exporters.exposition import Distribution
from exporters.requests.bounded_names import OTHER, UNKNOWN_MODEL
from exporters.requests.grouped_latency import PAIRS, GroupedLatency
from exporters.requests.record import RequestRecord
from exporters.requests.store import CounterStore
from exporters.sidecar_config import SidecarConfig, counting

CHAT = "/v1/chat/completions"


def record(n: int = 0, **other: object) -> RequestRecord:
    given = {"request_id": f"r{n}", "model": "base", "route": CHAT, "outcome": "ok", "ttft_ms": 300.0, "e2e_ms": 900.0}
    return RequestRecord(**{**given, **other})  # type: ignore[arg-type]


def shown(grouped: GroupedLatency) -> dict[tuple[str, ...], Distribution]:
    """What it shows: by family and labels."""
    return {
        (metric.name, *labels.values()): value
        for metric, labels, value in grouped.samples()
        if isinstance(value, Distribution)
    }


def counted(*records: RequestRecord) -> dict[tuple[str, ...], Distribution]:
    grouped = GroupedLatency()
    grouped.add_all(records)
    return shown(grouped)


def count(distributions: Iterable[Distribution]) -> int:
    return sum(sum(each.counts) for each in distributions)


def test_durations_are_by_route_and_first_tokens_by_adapter():
    found = counted(
        record(0), record(1, adapter="sql", ttft_ms=3000.0), record(2, route="/v1/embeddings", ttft_ms=None)
    )
    assert {
        (sidecar.ROUTE_E2E.name, CHAT, "base"),
        (sidecar.ROUTE_E2E.name, "/v1/embeddings", "base"),
        (sidecar.ADAPTER_TTFT.name, "sql", "base"),
    } == found.keys()
    adapter = found[sidecar.ADAPTER_TTFT.name, "sql", "base"]
    assert (1, 3.0) == (adapter.counts[bounds.GROUPED_TTFT_S.index(5.0)], adapter.sum)
    assert (2, 1.8) == (count([route := found[sidecar.ROUTE_E2E.name, CHAT, "base"]]), route.sum)


def test_a_value_on_a_bound_is_within_it():
    (found,) = counted(record(e2e_ms=1000.0, ttft_ms=None)).values()
    assert 1 == found.counts[bounds.GROUPED_REQUEST_S.index(1.0)]


def test_what_failed_or_has_no_value_is_not_counted():
    assert {} == counted(record(outcome="timeout"), record(e2e_ms=None), record(route=None, adapter="", ttft_ms=1.0))
    assert 1 == len(counted(record(outcome=None))), "a log without outcomes"


def test_without_adapters_there_is_no_series_of_adapters():
    assert {sidecar.ROUTE_E2E.name} == {name for name, *_ in counted(record())}


def test_further_pairs_are_one_series_and_none_is_lost():
    records = [record(n, adapter=f"a{n}") for n in range(PAIRS + 10)]
    found = {key: value for key, value in counted(*records).items() if key[0] == sidecar.ADAPTER_TTFT.name}
    assert PAIRS + 1 == len(found)
    assert 10 == count([found[sidecar.ADAPTER_TTFT.name, OTHER, OTHER]])
    assert PAIRS + 10 == count(found.values())


def test_names_of_clients_cannot_pose_as_others():
    """Reserved names are folded, and the character that parts a stored pair is in no label."""
    found = counted(record(route="/v1/x\0y"), record(1, route="__other__"), record(2, model=None))
    assert {
        (sidecar.ROUTE_E2E.name, "/v1/x?y", "base"),
        (sidecar.ROUTE_E2E.name, OTHER, OTHER),
        (sidecar.ROUTE_E2E.name, CHAT, UNKNOWN_MODEL),
    } == found.keys()


def test_state_and_names_outlive_a_restart():
    before = GroupedLatency()
    before.add_all([record(0), record(1, adapter="sql")])
    state = before.provider().state()
    after = GroupedLatency(state)
    assert shown(before) == shown(after)
    after.add_all([record(2)])
    assert 3 == count(value for key, value in shown(after).items() if key[0] == sidecar.ROUTE_E2E.name)


def test_series_are_committed_with_the_counters():
    store, grouped = CounterStore(counting(SidecarConfig())), GroupedLatency()
    store.keep([grouped.provider()])
    store.count([record()])
    grouped.add_all([record()])
    assert not any(metric is sidecar.ROUTE_E2E for metric, *_ in store.samples()), "not before the commit"
    store.commit({})
    assert any(metric is sidecar.ROUTE_E2E for metric, *_ in store.samples())
    store.count([record()])
    revision = grouped.provider().revision()
    grouped.add_all([])
    assert revision == grouped.provider().revision()
