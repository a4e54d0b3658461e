"""GPUs: present, cool, whole. From our sidecar, and for cards that no sidecar shows from NVIDIA's dcgm-exporter, in the
same base units."""

from __future__ import annotations

from alerts import thresholds
from alerts.labels import CARD, TARGET, by, on
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Severity
from alerts.settings import Settings
from exporters.catalogue import dcgm, gpu, promql, sidecar
from exporters.catalogue.prometheus import UP

_AGAINST_OUR_WILL = ('reason!~"sw_power_cap|sync_boost"',)
_UNCORRECTED = ('kind="uncorrected"',)
_KIND_GPU = 'kind="gpu"'
_REPEATED, _TRAINED = ('kind!="recovery"',), ('kind="recovery"',)
_LOST = 'reason="lost"'  # the other cards still answer
_CHIP = 'sensor="gpu"'
_SOURCE = (*TARGET, "source")
_THEIRS = (*TARGET, "UUID")


def _or_theirs(mine: str, theirs: str) -> str:
    """Our sidecar's figure, and DCGM's for the cards that no sidecar shows."""
    return (
        f'({mine} or (label_replace({theirs}, "uuid", "$1", "UUID", "(.+)") unless on (uuid)'
        f" {promql.series(gpu.INFO)}))"
    )


def _all_alike(*exprs: str) -> str:
    return f'label_replace({" or ".join(exprs)}, "uuid", "$1", "UUID", "(.+)")'


def alerts(s: Settings) -> tuple[Alert, ...]:
    ten, quarter, hour = (s.window(w) for w in ("10m", "15m", "1h"))
    hot, held, memory, links = (
        s.at(t)
        for t in (thresholds.GPU_TEMPERATURE, thresholds.THROTTLED, thresholds.GPU_MEMORY, thresholds.NVLINK_ERRORS)
    )
    throttled = promql.per_second(gpu.THROTTLE, ten, CARD, _AGAINST_OUR_WILL)
    their_heat = dcgm.THERMAL_VIOLATION.base(promql.repeated(dcgm.THERMAL_VIOLATION.metric, ten, _THEIRS))
    used, free = (field.base(promql.current(field.metric, _THEIRS)) for field in (dcgm.FB_USED, dcgm.FB_FREE))
    memory_share = promql.per(promql.worst(gpu.MEMORY_USED, CARD), promql.worst(gpu.MEMORY_TOTAL, CARD))
    xid = promql.worst(dcgm.XID_ERRORS.metric, _THEIRS)
    # over a gap, too: what is old news stays old
    xid_before = f"max {by(_THEIRS)} ({promql.last_samples(dcgm.XID_ERRORS.metric, hour, offset=hour)})"
    damaged = " + ".join(
        promql.repeated(f.metric, quarter, _THEIRS, per_second=False) for f in (dcgm.NVLINK_CRC, dcgm.NVLINK_REPLAY)
    )
    new_xid = promql.growth(gpu.XID_ERRORS, hour, (*CARD, "xid"))
    repeated, trained = (promql.growth(gpu.NVLINK_ERRORS, quarter, CARD, kinds) for kinds in (_REPEATED, _TRAINED))
    bad = [
        promql.repeated(gpu.ECC_ERRORS, hour, CARD, _UNCORRECTED, per_second=False) + " > 0",
        promql.repeated(dcgm.ECC_UNCORRECTED.metric, hour, _THEIRS, per_second=False) + " > 0",
        promql.worst(dcgm.REMAP_FAILURE.metric, _THEIRS) + " > 0",
    ]
    return (
        Alert(
            "VLLMGPUMissing",
            Severity.WARNING,
            f"group {by(CARD)} ({promql.last_samples(gpu.INFO, hour)})"
            f" unless group {by(CARD)} ({promql.series(gpu.INFO)}) "
            f"and {on(TARGET)} ({promql.series(UP, (s.sidecar,))} == 1) "
            f"or {promql.current(sidecar.SOURCE_UP, _SOURCE, (_KIND_GPU,))} == 0 "
            # a host that never had a GPU misses none
            f"and {promql.current(sidecar.SOURCE_LAST_SUCCESS, _SOURCE, (_KIND_GPU,))} "
            f"or {promql.worst(gpu.ABSENT, CARD, (_LOST,))} > 0",
            hold="2m",
            summary="A GPU cannot be seen any more.",
            description=(
                "The sidecar {{ $labels.instance }} no longer gets readings of a GPU{{ with $labels.uuid }} {{ . }}{{"
                " end }}: it fell off the bus, or the driver does not answer."
            ),
            panel=PanelRef("gpu", "cards"),
            owner="hardware",
        ),
        Alert(
            "VLLMGPUHot",
            Severity.WARNING,
            f"{_or_theirs(promql.worst(gpu.TEMPERATURE, CARD, (_CHIP,)), promql.worst(dcgm.GPU_TEMP.metric, _THEIRS))}"
            f" > {hot}",
            hold="5m",
            keep_firing="5m",
            summary="A GPU is hot.",
            description=(
                "GPU {{ $labels.uuid }} at {{ $labels.instance }} is at {{ $value | humanize }} degrees; a few more and"
                " it slows itself down."
            ),
            panel=PanelRef("gpu", "temperature"),
            owner="hardware",
            threshold=hot,
            drawn=False,
            muted_by=("VLLMGPUMissing", "VLLMGPUThrottled"),
        ),
        Alert(
            "VLLMGPUThrottled",
            Severity.WARNING,
            f"{_or_theirs(throttled, their_heat)} > {held}",
            hold="5m",
            keep_firing="5m",
            summary="A GPU runs slower because of heat or a power brake.",
            description=(
                "GPU {{ $labels.uuid }} at {{ $labels.instance }} is held down {{ $value | humanizePercentage }} of the"
                " time."
            ),
            panel=PanelRef("gpu", "held-down"),
            owner="hardware",
            threshold=held,
            muted_by=("VLLMGPUMissing",),
        ),
        Alert(
            "VLLMGPUXid",
            Severity.WARNING,
            _all_alike(f"{new_xid} > 0", f"{xid} > 0 unless {xid} == {xid_before}"),
            hold="0s",
            summary="The driver has reported a GPU error.",
            description=(
                "GPU {{ $labels.uuid }} at {{ $labels.instance }} reports XID {{ with $labels.xid }}{{ . }}{{ else }}"
                "{{ $value | humanize }}{{ end }}; requests on it may have been lost."
            ),
            panel=PanelRef("gpu", "xid"),
            owner="hardware",
        ),
        Alert(
            "VLLMGPUECCErrors",
            Severity.WARNING,
            _all_alike(*bad),
            hold="0s",
            summary="A GPU has memory errors that could not be corrected.",
            description=(
                "GPU {{ $labels.uuid }} at {{ $labels.instance }} has had uncorrected memory errors within the hour, or"
                " has no spare rows left."
            ),
            panel=PanelRef("gpu", "ecc"),
            owner="hardware",
        ),
        Alert(
            "VLLMGPUNVLinkErrors",
            Severity.WARNING,
            _all_alike(
                f"{repeated} > {links}",
                f"{trained} > 0",
                f"({damaged}) > {links}",
                f"{promql.repeated(dcgm.NVLINK_RECOVERY.metric, quarter, _THEIRS, per_second=False)} > 0",
            ),
            hold="0s",
            keep_firing="15m",
            summary="The link between GPUs is failing.",
            description=(
                "The NVLinks of GPU {{ $labels.uuid }} at {{ $labels.instance }} counted {{ $value | humanize }} errors"
                " within a quarter of an hour."
            ),
            panel=PanelRef("gpu", "nvlink-errors"),
            owner="hardware",
            threshold=links,
            drawn=False,
        ),
        Alert(
            "VLLMGPUMemoryNearlyFull",
            Severity.WARNING,
            f"{_or_theirs(memory_share, f'{used} / ({used} + {free} > 0)')} > {memory}",
            hold="5m",
            summary="The memory of a GPU is nearly full.",
            description=(
                "GPU {{ $labels.uuid }} at {{ $labels.instance }} has {{ $value | humanizePercentage }} of its memory"
                " in use; the next allocation may end the engine."
            ),
            panel=PanelRef("gpu", "memory-share"),
            owner="hardware",
            threshold=memory,
            muted_by=("VLLMGPUMissing",),
        ),
    )
