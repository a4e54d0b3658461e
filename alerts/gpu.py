"""Alerts on GPUs: missing, hot, throttled, faulty or full.

Values come from our sidecar, and for GPUs without a sidecar from NVIDIA's dcgm-exporter, in the same base units."""

from __future__ import annotations

from alerts import thresholds
from alerts.labels import GPU, TARGET, by, on
from alerts.panel_ref import PanelRef
from alerts.rules import Alert, Severity
from alerts.settings import Settings
from exporters.catalogue import dcgm, gpu, promql, sidecar
from exporters.catalogue.prometheus import UP

_UNWANTED = ('reason!~"sw_power_cap|sync_boost"',)
_UNCORRECTED = ('kind="uncorrected"',)
_KIND_GPU = 'kind="gpu"'
_REPEATED, _TRAINED = ('kind!="recovery"',), ('kind="recovery"',)
_LOST = 'reason="lost"'  # the other GPUs still answer
_CHIP = 'sensor="gpu"'
_SOURCE = (*TARGET, "source")
_DCGM_GPU = (*TARGET, "UUID")


def _or_dcgm(mine: str, dcgm_value: str) -> str:
    """Return the value of our sidecar, or that of DCGM for GPUs that no sidecar reports."""
    return (
        f'({mine} or (label_replace({dcgm_value}, "uuid", "$1", "UUID", "(.+)") unless on (uuid)'
        f" {promql.series(gpu.INFO)}))"
    )


def _all_alike(*exprs: str) -> str:
    """Return the union of expressions, with the label `UUID` of DCGM copied to `uuid`."""
    return f'label_replace({" or ".join(exprs)}, "uuid", "$1", "UUID", "(.+)")'


def alerts(s: Settings) -> tuple[Alert, ...]:
    ten, quarter, hour = (s.window(w) for w in ("10m", "15m", "1h"))
    hot, held, memory, links = (
        s.at(t)
        for t in (thresholds.GPU_TEMPERATURE, thresholds.THROTTLED, thresholds.GPU_MEMORY, thresholds.NVLINK_ERRORS)
    )
    throttled = promql.per_second(gpu.THROTTLE, ten, GPU, _UNWANTED)
    dcgm_throttled = dcgm.THERMAL_VIOLATION.base(promql.repeated(dcgm.THERMAL_VIOLATION.metric, ten, _DCGM_GPU))
    used, free = (field.base(promql.current(field.metric, _DCGM_GPU)) for field in (dcgm.FB_USED, dcgm.FB_FREE))
    memory_share = promql.per(promql.worst(gpu.MEMORY_USED, GPU), promql.worst(gpu.MEMORY_TOTAL, GPU))
    xid = promql.worst(dcgm.XID_ERRORS.metric, _DCGM_GPU)
    # also across a gap: an XID that was reported before stays reported
    xid_before = f"max {by(_DCGM_GPU)} ({promql.last_samples(dcgm.XID_ERRORS.metric, hour, offset=hour)})"
    damaged = " + ".join(
        promql.repeated(f.metric, quarter, _DCGM_GPU, per_second=False) for f in (dcgm.NVLINK_CRC, dcgm.NVLINK_REPLAY)
    )
    new_xid = promql.growth(gpu.XID_ERRORS, hour, (*GPU, "xid"))
    repeated, trained = (promql.growth(gpu.NVLINK_ERRORS, quarter, GPU, kinds) for kinds in (_REPEATED, _TRAINED))
    bad = [
        promql.repeated(gpu.ECC_ERRORS, hour, GPU, _UNCORRECTED, per_second=False) + " > 0",
        promql.repeated(dcgm.ECC_UNCORRECTED.metric, hour, _DCGM_GPU, per_second=False) + " > 0",
        promql.worst(dcgm.REMAP_FAILURE.metric, _DCGM_GPU) + " > 0",
    ]
    return (
        Alert(
            "VLLMGPUMissing",
            Severity.WARNING,
            f"group {by(GPU)} ({promql.last_samples(gpu.INFO, hour)})"
            f" unless group {by(GPU)} ({promql.series(gpu.INFO)}) "
            f"and {on(TARGET)} ({promql.series(UP, (s.sidecar,))} == 1) "
            f"or {promql.current(sidecar.SOURCE_UP, _SOURCE, (_KIND_GPU,))} == 0 "
            # a host that never had a GPU has none missing
            f"and {promql.current(sidecar.SOURCE_LAST_SUCCESS, _SOURCE, (_KIND_GPU,))} "
            f"or {promql.worst(gpu.ABSENT, GPU, (_LOST,))} > 0",
            hold="2m",
            summary="GPU missing:{{ with $labels.uuid }} {{ . }}{{ end }} on {{ $labels.instance }}",
            description=(
                "The sidecar {{ $labels.instance }} has had no readings of a GPU{{ with $labels.uuid }} ({{ . }})"
                "{{ end }} for 2 min, although it had before: the GPU fell off the bus, or the driver does not"
                " answer. Run nvidia-smi -L on the host, and check whether the engine on it still answers."
            ),
            panel=PanelRef("gpu", "gpus"),
            owner="hardware",
        ),
        Alert(
            "VLLMGPUHot",
            Severity.WARNING,
            f"{_or_dcgm(promql.worst(gpu.TEMPERATURE, GPU, (_CHIP,)), promql.worst(dcgm.GPU_TEMP.metric, _DCGM_GPU))}"
            f" > {hot}",
            hold="5m",
            keep_firing="5m",
            summary="GPU hot: {{ $labels.uuid }} on {{ $labels.instance }}",
            description=(
                "{{ $labels.uuid }} on {{ $labels.instance }} is at {{ $value | humanize }} °C, above"
                f" {hot.shown} for 5 min; a few degrees more and it throttles. Compare it with the other GPUs of"
                " the host: if all are hot it is the cooling, if one is hot it is this GPU."
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
            f"{_or_dcgm(throttled, dcgm_throttled)} > {held}",
            hold="5m",
            keep_firing="5m",
            summary="GPU throttled: {{ $labels.uuid }} on {{ $labels.instance }}",
            description=(
                "{{ $labels.uuid }} on {{ $labels.instance }} ran at reduced clocks for"
                " {{ $value | humanizePercentage }} of the last 10 min because of heat or a power brake. Check the"
                " reason (First five minutes, step 1): thermal is the cooling, hw_power_brake is the power supply or"
                " the rack."
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
            summary="GPU error (XID): {{ $labels.uuid }} on {{ $labels.instance }}",
            description=(
                "The driver reported XID {{ with $labels.xid }}{{ . }}{{ else }}{{ $value | humanize }}{{ end }}"
                " for {{ $labels.uuid }} on {{ $labels.instance }} within the last hour; requests on it may be"
                " lost. Read the first XID in the kernel log (First five minutes, step 2), and check whether the"
                " engine on this"
                " GPU still makes tokens."
            ),
            panel=PanelRef("gpu", "xid"),
            owner="hardware",
        ),
        Alert(
            "VLLMGPUECCErrors",
            Severity.WARNING,
            _all_alike(*bad),
            hold="0s",
            summary="GPU memory errors (ECC): {{ $labels.uuid }} on {{ $labels.instance }}",
            description=(
                "{{ $labels.uuid }} on {{ $labels.instance }} had uncorrected memory errors within the last"
                " hour, or has no spare rows left. Check whether the engine on it still answers, and how many rows"
                " were remapped (First five minutes, steps 2 and 3)."
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
                f"{promql.repeated(dcgm.NVLINK_RECOVERY.metric, quarter, _DCGM_GPU, per_second=False)} > 0",
            ),
            hold="0s",
            keep_firing="15m",
            summary="NVLink errors: {{ $labels.uuid }} on {{ $labels.instance }}",
            description=(
                "The NVLinks of {{ $labels.uuid }} on {{ $labels.instance }} counted {{ $value | humanize }}"
                " errors within 15 min; every collective of a tensor-parallel engine waits for a failing link."
                " Check which link it is with nvidia-smi nvlink -e (First five minutes, step 3), and whether the"
                " inter-token"
                " latency rose."
            ),
            panel=PanelRef("gpu", "nvlink-errors"),
            owner="hardware",
            threshold=links,
            drawn=False,
        ),
        Alert(
            "VLLMGPUMemoryNearlyFull",
            Severity.WARNING,
            f"{_or_dcgm(memory_share, f'{used} / ({used} + {free} > 0)')} > {memory}",
            hold="5m",
            summary="GPU memory nearly full: {{ $labels.uuid }} on {{ $labels.instance }}",
            description=(
                "{{ $labels.uuid }} on {{ $labels.instance }} uses {{ $value | humanizePercentage }} of its"
                f" memory, above {memory.shown} for 5 min; the next allocation may end the engine. Find the"
                " processes on this GPU with nvidia-smi (First five minutes, step 3): a second process is the most"
                " frequent"
                " cause."
            ),
            panel=PanelRef("gpu", "memory-share"),
            owner="hardware",
            threshold=memory,
            muted_by=("VLLMGPUMissing",),
        ),
    )
