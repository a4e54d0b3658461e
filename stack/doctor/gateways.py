"""Notes on several gateways: which did not answer, which has no lease, and whether their policies are the same. Pure.

Values of gateways are summed over all of them, so one that is missing makes every sum too low."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

from exporters.catalogue import gateway
from stack.doctor.series import SeriesWindow

_HELP = "vllm-watch runbook {}"


def gateway_notes(series: SeriesWindow) -> Iterator[str]:
    """Yield what is wrong between the gateways, each with the runbook that says what to do."""
    answered = _instances(series, gateway.SLOTS.name)
    for name, why in series.lost.items():
        yield (
            f"gateway {name} does not answer ({why}); sums are those of {_listed(answered)}"
            f" ({_HELP.format('VLLMGatewayReplicaDown')})"
        )
    leased = {labels["instance"]: value for labels, value in series.highest.of(gateway.LEASE_LOST.name)}
    if lost := sorted(name for name, value in leased.items() if value > 0):
        yield (
            f"{_listed(lost)} had no lease and admitted within a fixed share ({_HELP.format('VLLMGatewayNotSharing')})"
        )
    if leased and (alone := [name for name in answered if name not in leased]):
        yield f"{_listed(alone)} shares no limits, because it has no sharing.store, and others have one"
    seen = max((value for _, value in series.highest.of(gateway.LEASE_REPLICAS.name)), default=0.0)
    if len(answered) + len(series.lost) < seen:
        yield f"{seen:.0f} gateways have a lease and {len(answered)} were read, so sums over gateways are too low"
    yield from _policies(series)


def _policies(series: SeriesWindow) -> Iterator[str]:
    """Yield the policies where two gateways had none in common: one that reloaded within the time had several."""
    of_gateway = defaultdict[str, set[str]](set)
    for labels, _ in series.highest.of(gateway.POLICY_INFO.name):
        of_gateway[labels["instance"]].add(labels.get("policy", ""))
    if any(one.isdisjoint(other) for one, other in combinations(of_gateway.values(), 2)):
        each = ", ".join(f"{name}: {' and '.join(sorted(having))}" for name, having in sorted(of_gateway.items()))
        yield (
            f"gateways have different policies ({each}), so one has not read the latest teams.yaml"
            f" ({_HELP.format('VLLMGatewayNotSharing')})"
        )


def _instances(series: SeriesWindow, name: str) -> list[str]:
    return sorted({labels["instance"] for labels, _ in series.highest.of(name)})


def _listed(names: list[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
