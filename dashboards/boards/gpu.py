"""Dashboard GPU: health, use and power of GPUs.

Every figure of a GPU comes from our sidecar, or, for GPUs that no sidecar shows, from NVIDIA's dcgm-exporter in the
same base units; a GPU never shows twice. One line is one GPU, called by the start of its uuid, which the table of
GPUs spells out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alerts import thresholds
from dashboards import queries
from dashboards.model import RATE, Dashboard, DashboardRow, Panel, Precondition, Query, Shape, shown_unit
from exporters.catalogue import dcgm, gpu, promql, vllm
from exporters.catalogue.dcgm import Field
from exporters.catalogue.metric import Metric, Unit

_CARD = ("uuid",)
_PLACE = queries.where(gpu.INFO)  # the cluster
_SEEN = promql.series(gpu.INFO, _PLACE)
_NAMED = ("index", "name", "mig", "driver_version")
_HEAT = ('reason!~"sw_power_cap|sync_boost"',)  # what is held down against the operator's will
_UNCORRECTED = ('kind="uncorrected"',)
_ANY_WORK = ('kind="graphics"',)
_DIVIDED = (*_PLACE, 'GPU_I_ID!=""')
_DCGM = "DCGM"


# Our own GPUs. The highest by uuid, never the sum: two sidecars that see one GPU do not make two.


def _ours(metric: Metric, *split: str, only: Sequence[str] = ()) -> str:
    return promql.worst(metric, (*_CARD, *split), (*_PLACE, *only))


def _ours_rate(metric: Metric, *split: str, only: Sequence[str] = ()) -> str:
    return promql.repeated(metric, RATE, (*_CARD, *split), (*_PLACE, *only))


def _ours_growth(metric: Metric, *split: str) -> str:
    return promql.repeated(metric, RATE, (*_CARD, *split), _PLACE, per_second=False)


GPUS = f"count(count by (uuid) ({_SEEN}))"
WATTS = f"sum({_ours(gpu.POWER)})"
PRESENT = Precondition(
    "gpu",
    "GPU",
    f"group({promql.last_samples(gpu.INFO, queries.RANGE, _PLACE)}) or"
    f" group({promql.last_samples(dcgm.GPU_TEMP.metric, queries.RANGE, _PLACE)})",
    "No GPU is seen in this range: start the sidecar on the GPU host, or NVIDIA's dcgm-exporter. An engine on a CPU has"
    " none, which is no fault.",
)


# GPUs that only dcgm-exporter shows. It repeats a GPU's figure for each MIG instance and for each pod that shares the
# GPU.


def _theirs(field: Field, *place: str) -> str:
    """A gauge by GPU, in base units."""
    return _others(field.base(promql.worst(field.metric, ("UUID", *place), _PLACE)))


def _their_sum(field: Field) -> str:
    """A gauge of which each MIG instance has its own part, added up by GPU."""
    return field.base(f"sum by (UUID) ({promql.worst(field.metric, ('UUID', 'GPU_I_ID'), _PLACE)})")


def _their_rate(field: Field) -> str:
    return _others(field.base(promql.repeated(field.metric, RATE, ("UUID",), _PLACE)))


def _their_growth(field: Field) -> str:
    return _others(field.base(promql.repeated(field.metric, RATE, ("UUID",), _PLACE, per_second=False)))


def _same_key(expr: str) -> str:
    """DCGM's UUID as our uuid."""
    return f'label_replace({expr}, "uuid", "$1", "UUID", "(.+)")'


def _others(expr: str, but: str = _SEEN) -> str:
    """Without the GPUs that a sidecar shows; but: where it may show a GPU and not this figure of it, as with
    nvidia-smi."""
    return f"({_same_key(expr)} unless on (uuid) {but})"


def _their_links(field: Field) -> str:
    """Growth on the links of a GPU."""
    grown = promql.repeated(field.metric, RATE, ("UUID",), _PLACE, per_second=False)
    return _others(field.base(grown), f"({promql.last_samples(gpu.NVLINK_ERRORS, '5m', _PLACE)})")


# Queries. Lines carry the start of the uuid; figures of all GPUs together say which exporter they are from.


def _line(expr: str, unit: Unit, called: str = "", per_second: bool = False) -> Query:
    short = f'label_replace({expr}, "gpu", "$1", "uuid", "(.{{1,12}}).*")'
    return Query(short, queries.legend(("gpu",), called), shown_unit(unit, per_second))


def _lines(metric: Metric, field: Field, called: str = "") -> tuple[Query, Query]:
    """A gauge by GPU: from our sidecar, else from dcgm-exporter."""
    if metric.unit is not field.metric.unit:
        raise promql.InvalidQuery(
            f"{metric.name} is in {metric.unit} and {field.metric.name} in {field.metric.unit}: not the same figure"
        )
    return _line(_ours(metric), metric.unit, called), _line(_theirs(field), metric.unit, called)


def _figures(ours: str, theirs: str, unit: Unit, called: str = "sidecar") -> tuple[Query, Query]:
    return Query(ours, called, shown_unit(unit)), Query(theirs, _DCGM, shown_unit(unit))


def _capped(expr: str) -> str:
    """A share that may pass 1 for a moment, by the jitter of a scrape or of the GPU's own control loop."""
    return f"clamp_max({expr}, 1)"


_THEIR_TOTAL = (
    f"({_their_sum(dcgm.FB_USED)} + {_their_sum(dcgm.FB_FREE)} + ({_their_sum(dcgm.FB_RESERVED)} or"
    f" {_their_sum(dcgm.FB_USED)} * 0))"
)
_CLUSTER = ("cluster",)
# each GPU once, whichever exporter shows it
_EVERY_WATT = f"({_ours(gpu.POWER, *_CLUSTER)} or {_theirs(dcgm.POWER_USAGE, *_CLUSTER)})"
_TOKENS_PER_JOULE = Query(
    promql.per(promql.per_second(vllm.GENERATION_TOKENS, RATE, _CLUSTER, _PLACE), f"sum by (cluster) {_EVERY_WATT}"),
    queries.legend(_CLUSTER, "all"),
)

# What the driver calls a GPU, once: two sidecars may number it differently, as in a container that sees only some of
# the GPUs.
_NAMES = f"topk by (uuid) (1, max by (uuid, {', '.join(_NAMED)}) ({_SEEN}))"


def _named(expr: str, called: str, unit: Unit) -> Query:
    """A figure by GPU, with what the driver calls the GPU."""
    return Query(f"{expr} * on (uuid) group_left ({', '.join(_NAMED)}) {_NAMES}", called, shown_unit(unit))


def _of_instances(expr: str, unit: Unit) -> Query:
    """Return a metric by MIG instance of our GPUs, with its profile where that is known."""
    part = "uuid, gpu_instance"
    profiles = f"topk by ({part}) (1, max by ({part}, profile) ({promql.series(gpu.MIG_INFO, _PLACE)}))"
    return _line(f"({expr} * on ({part}) group_left (profile) {profiles})", unit, "{{gpu_instance}} {{profile}}")


def _of_their_instances(expr: str, unit: Unit) -> Query:
    return Query(expr, "GPU {{gpu}} instance {{GPU_I_ID}} {{GPU_I_PROFILE}}", shown_unit(unit))


def _their_instances(field: Field, shown: Metric) -> str:
    """A gauge by MIG instance, for GPUs of which no sidecar shows this."""
    divided = promql.worst(field.metric, ("UUID", "gpu", "GPU_I_ID", "GPU_I_PROFILE"), _DIVIDED)
    return _others(field.base(divided), promql.series(shown, _PLACE))


_PART_USED = _their_instances(dcgm.FB_USED, gpu.MIG_MEMORY_USED)


def _held(field: Field, reason: str) -> Query:
    return Query(
        _capped(f"max({_their_rate(field)})"), f"{reason} ({_DCGM})", shown_unit(Unit.SECONDS, per_second=True)
    )


_TOP = (
    Panel(
        "gpus",
        "GPUs",
        "How many GPUs are seen, by a sidecar and by dcgm-exporter alone.",
        "The number you pay for.",
        "A missing GPU fell off the bus, or its host or exporter is down: look at the readings that failed and at the"
        " host's kernel log.",
        _figures(GPUS, f"count({_theirs(dcgm.GPU_TEMP)})", Unit.COUNT),
        Shape.NUMBER,
        width=4,
        height=5,
    ),
    Panel(
        "utilization-mean",
        "Utilisation, mean of the GPUs",
        "Share of the time in which a kernel ran, as the mean of all GPUs. It says busy, not how full: one small"
        " kernel keeps it at 100 %.",
        "High while requests are served.",
        "Low under load means that the engine waits for something else: look at its queue, at the CPU and at"
        " throttling.",
        _figures(f"avg({_ours(gpu.UTILIZATION)})", f"avg({_theirs(dcgm.GPU_UTIL)})", Unit.RATIO),
        Shape.NUMBER,
        width=5,
        height=5,
        optional=(
            "Empty while every GPU is divided by MIG, whose use the driver does not measure; else start the sidecar on"
            " the GPU host."
        ),
    ),
    Panel(
        "hottest",
        "Hottest sensor",
        "The highest temperature of any GPU, chip or memory.",
        "Steady under load and well below the GPU's slowdown temperature, often 85 to 95 degrees.",
        "Check air flow, neighbours and fans; the panel on throttling shows whether it costs speed already.",
        (
            *_figures(f"max({_ours(gpu.TEMPERATURE)})", f"max({_theirs(dcgm.GPU_TEMP)})", Unit.CELSIUS),
            Query(f"max({_theirs(dcgm.MEMORY_TEMP)})", f"{_DCGM}, memory", shown_unit(Unit.CELSIUS)),
        ),
        Shape.NUMBER,
        width=5,
        height=5,
    ),
    Panel(
        "held-down",
        "Thermal or power-brake throttling, worst GPU",
        "Share of the time in which the worst GPU ran slower because of heat or a power brake. The power cap that was"
        " set is not counted.",
        "Zero.",
        "Cool the host, or look for a failing power supply; until then give that GPU less work.",
        _figures(
            _capped(f"max({_ours_rate(gpu.THROTTLE, 'reason', only=_HEAT)})"),
            _capped(f"max({_their_rate(dcgm.THERMAL_VIOLATION)})"),
            Unit.RATIO,
        ),
        Shape.NUMBER,
        threshold=thresholds.THROTTLED,
        width=5,
        height=5,
        full_scale=False,
    ),
    Panel(
        "bad-rows",
        "Rows remapped after uncorrected errors",
        "Memory rows that were replaced by spare ones after an error that could not be corrected, all GPUs together.",
        "Zero, or a number that has not changed since the GPU was taken into service.",
        "A rising number is a GPU that wears out: find it below, plan its exchange, and drain it once remapping fails.",
        _figures(
            f"sum({_ours(gpu.REMAPPED_ROWS, only=_UNCORRECTED)})",
            f"sum({_theirs(dcgm.REMAPPED_UNCORRECTED)})",
            Unit.COUNT,
        ),
        Shape.NUMBER,
        width=5,
        height=5,
        bad_from=1,
        optional=(
            "Empty on GPUs older than Ampere and while MIG is on, which report no rows; else start the sidecar on the"
            " GPU host."
        ),
    ),
    Panel(
        "utilization",
        "Utilisation",
        "Share of the last sampling period in which a kernel ran, by GPU. It says busy, not how full.",
        "High and alike on GPUs that serve one model.",
        "One GPU far below the others waits for them, or is not used at all: compare its clocks and throttling, then"
        " the engine's parallelism.",
        _lines(gpu.UTILIZATION, dcgm.GPU_UTIL),
        optional=(
            "Empty while every GPU is divided by MIG, whose use the driver does not measure; else start the sidecar on"
            " the GPU host."
        ),
    ),
    Panel(
        "power-share",
        "Power, share of the limit",
        "Power drawn over the power limit in force, by GPU. A GPU may pass its limit for a moment; that is shown as"
        " 100 %.",
        "Near 100 % in prefill, lower in decode, which waits for memory.",
        "Always at 100 % with the clock falling: raise the limit if the host can carry it. Low under load: the GPU"
        " waits, see utilisation.",
        (
            _line(_capped(promql.per(_ours(gpu.POWER), _ours(gpu.POWER_LIMIT))), Unit.RATIO),
            _line(_capped(promql.per(_theirs(dcgm.POWER_USAGE), _theirs(dcgm.POWER_LIMIT))), Unit.RATIO),
        ),
    ),
    Panel(
        "tokens-per-joule",
        "Tokens per joule",
        "Generated tokens per second over the watts of all GPUs in the same cluster. Engines and GPUs are joined by"
        " these sums only: GPUs that serve nothing, or something else, count as well, and a GPU that nobody shows"
        " makes the figure too high.",
        "Steady for the same model and load; it rises with the batch size.",
        "A fall at the same load is waste: look for throttling, preemptions or a batch that shrank.",
        (_TOKENS_PER_JOULE,),
        detail="tuning-options",
        optional=(
            "Empty where engines and GPUs carry different clusters; else start the sidecar on the GPU host, or"
            " NVIDIA's dcgm-exporter."
        ),
    ),
)

_MEMORY = (
    Panel(
        "memory-share",
        "Memory in use, share of the GPU",
        "Device memory in use over all that the GPU has.",
        "Flat, a little above the engine's --gpu-memory-utilization: vLLM takes its KV cache once, at the start.",
        "Growth over hours is a leak or a second process; near 100 % the next allocation fails. Compare with the"
        " processes on the host.",
        (
            _line(promql.per(_ours(gpu.MEMORY_USED), _ours(gpu.MEMORY_TOTAL)), Unit.RATIO),
            _line(_others(promql.per(_their_sum(dcgm.FB_USED), _THEIR_TOTAL)), Unit.RATIO),
        ),
        threshold=thresholds.GPU_MEMORY,
        width=6,
    ),
    Panel(
        "memory",
        "Memory by state, all GPUs",
        "Device memory that is used, free, and reserved by driver and firmware.",
        "Used is flat and free is small but never zero.",
        "Much free memory is KV cache that nobody has: raise --gpu-memory-utilization, after a look at the peak of the"
        " longest prompts.",
        tuple(
            query
            for state, metric, field in (
                ("used", gpu.MEMORY_USED, dcgm.FB_USED),
                ("free", gpu.MEMORY_FREE, dcgm.FB_FREE),
                ("reserved", gpu.MEMORY_RESERVED, dcgm.FB_RESERVED),
            )
            for query in (
                Query(f"sum({_ours(metric)})", state, shown_unit(metric.unit)),
                Query(f"sum({_others(_their_sum(field))})", f"{state} ({_DCGM})", shown_unit(metric.unit)),
            )
        ),
        Shape.STACK,
        width=6,
    ),
    Panel(
        "memory-busy",
        "Memory interface activity",
        "Share of the last sampling period in which device memory was read or written, by GPU.",
        "High in decode, which is bound by memory; lower in prefill.",
        "Low while requests run means small batches or waiting: look at the batch size and at the queue.",
        _lines(gpu.MEMORY_BUSY, dcgm.MEM_COPY_UTIL),
        width=6,
        optional=(
            "Empty while every GPU is divided by MIG, whose use the driver does not measure; else start the sidecar on"
            " the GPU host."
        ),
    ),
    Panel(
        "clocks",
        "Clocks",
        "Clock of the SMs and of device memory, by GPU.",
        "Near the GPU's maximum under load; low when idle, which saves power.",
        "A low SM clock under load is throttling or a clock lock: the panel on throttling has the reason.",
        (*_lines(gpu.SM_CLOCK, dcgm.SM_CLOCK, "SM"), *_lines(gpu.MEM_CLOCK, dcgm.MEM_CLOCK, "memory")),
        width=6,
    ),
)

_HEAT_AND_POWER = (
    Panel(
        "power",
        "Power and limit",
        "Watts that the whole board draws, and the limit in force.",
        "Below the limit, and alike on GPUs that do the same work.",
        "A GPU that draws far less than its twins does less: compare utilisation. A changed limit is someone's"
        " setting: ask who.",
        (*_lines(gpu.POWER, dcgm.POWER_USAGE, "draws"), *_lines(gpu.POWER_LIMIT, dcgm.POWER_LIMIT, "limit")),
    ),
    Panel(
        "temperature",
        "Temperature by sensor",
        "Temperature of the chip and of device memory, by GPU.",
        "Steady under load.",
        "One GPU above its neighbours has bad air flow or a failing fan; all of them rising is the room.",
        (
            _line(_ours(gpu.TEMPERATURE, "sensor"), Unit.CELSIUS, "{{sensor}}"),
            _line(_theirs(dcgm.GPU_TEMP), Unit.CELSIUS, "gpu"),
            _line(_theirs(dcgm.MEMORY_TEMP), Unit.CELSIUS, "memory"),
        ),
    ),
    Panel(
        "throttle-now",
        "GPUs throttled now, by reason",
        "How many GPUs say that their clocks are held down, by reason. hw_slowdown is any of the other hw_ reasons, or"
        " a signal from outside.",
        "None but sw_power_cap, which is a GPU that works at its limit, as set.",
        "The panels beside it say since when and how much of the time; a thermal reason on one GPU is that GPU, on"
        " all of them the room.",
        (
            Query(
                f"sum by (reason) ({_ours(gpu.THROTTLED_NOW, 'reason')})",
                queries.legend(("reason",)),
                shown_unit(Unit.COUNT),
            ),
        ),
        Shape.STACK,
    ),
    Panel(
        "throttle-reasons",
        "Throttling by reason",
        "Share of the time in which the clocks were held down, on the worst GPU for each reason.",
        "sw_power_cap is a GPU that works at its limit, as set; all other reasons are zero.",
        "Thermal reasons: cooling. hw_power_brake: the power supply. sync_boost: one GPU of the group slows the rest.",
        (
            Query(
                _capped(f"max by (reason) ({_ours_rate(gpu.THROTTLE, 'reason')})"),
                "{{reason}}",
                shown_unit(Unit.SECONDS, per_second=True),
            ),
            _held(dcgm.POWER_VIOLATION, "power"),
            _held(dcgm.THERMAL_VIOLATION, "thermal"),
            _held(dcgm.SYNC_BOOST_VIOLATION, "sync_boost"),
            _held(dcgm.BOARD_LIMIT_VIOLATION, "board limit"),
            _held(dcgm.RELIABILITY_VIOLATION, "reliability"),
        ),
        width=12,
    ),
    Panel(
        "throttle-cards",
        "Thermal or power-brake throttling, by GPU",
        "Share of the time in which a GPU ran slower because of heat or a power brake, the worse of its reasons.",
        "Zero.",
        "This GPU slows every request it takes part in: cool it, or take it out of service.",
        (
            _line(
                _capped(f"max by (uuid) ({_ours_rate(gpu.THROTTLE, 'reason', only=_HEAT)})"),
                Unit.SECONDS,
                per_second=True,
            ),
            _line(_capped(_their_rate(dcgm.THERMAL_VIOLATION)), Unit.SECONDS, per_second=True),
        ),
        width=12,
        full_scale=False,
    ),
)

_ERRORS = (
    Panel(
        "xid",
        "XID errors",
        "Errors that the driver reported, by GPU. From our sidecar: how many of each number came in this range; other"
        " stands for numbers that mean no lost work. From dcgm-exporter: the number of the last one, which is a code"
        " and no count, and stays until the exporter starts again.",
        "No row of ours, and 0 as the last number.",
        "Look the code up in NVIDIA's XID list: 13 and 31 are mostly the application, 48, 63, 64 and 94 memory, 79 a"
        " GPU off the bus, 74 NVLink.",
        (
            Query(
                f"{promql.repeated(gpu.XID_ERRORS, '$__range', ('uuid', 'xid'), _PLACE, per_second=False)} > 0",
                "errors",
            ),
            Query(
                _same_key(promql.worst(dcgm.XID_ERRORS.metric, ("UUID", "hostname", "err_msg"), _PLACE)),
                "last number (DCGM)",
            ),
        ),
        Shape.TABLE,
        width=24,
        optional=(
            "No GPU reported an error in this range, or no exporter reads XID errors: the sidecar does so by NVML,"
            " dcgm-exporter anywhere. Start one of them on the GPU host."
        ),
    ),
    Panel(
        "ecc",
        "Memory errors",
        "ECC errors that came up in each interval, by GPU: corrected and uncorrected.",
        "Corrected ones are rare; uncorrected ones never happen.",
        "An uncorrected error ends the work on that GPU. Restart the engine there; when it comes back, exchange the"
        " GPU.",
        (
            _line(_ours_growth(gpu.ECC_ERRORS, "kind"), Unit.COUNT, "{{kind}}"),
            _line(_their_growth(dcgm.ECC_CORRECTED), Unit.COUNT, "corrected"),
            _line(_their_growth(dcgm.ECC_UNCORRECTED), Unit.COUNT, "uncorrected"),
        ),
        width=12,
        optional=(
            "Empty on GPUs without ECC, or while it is off; turn it on with nvidia-smi -e 1, and name the"
            " ECC_*_AGG_TOTAL fields in dcgm-exporter's counters file."
        ),
    ),
    Panel(
        "remapped-rows",
        "Remapped rows",
        "Memory rows replaced by spare ones so far, by GPU and by the kind of error that caused it.",
        "Zero, or flat.",
        "A row is replaced at the next reset of the GPU. Rising uncorrected rows, or a failed remapping, are a reason"
        " to exchange it.",
        (
            _line(_ours(gpu.REMAPPED_ROWS, "kind"), Unit.COUNT, "{{kind}}"),
            _line(_theirs(dcgm.REMAPPED_CORRECTED), Unit.COUNT, "corrected"),
            _line(_theirs(dcgm.REMAPPED_UNCORRECTED), Unit.COUNT, "uncorrected"),
            _line(_theirs(dcgm.REMAP_FAILURE), Unit.COUNT, "failed"),
        ),
        width=12,
        optional=(
            "Empty on GPUs older than Ampere and while MIG is on, which report no rows; else start the sidecar on the"
            " GPU host."
        ),
    ),
)

_MORE = (
    Panel(
        "card-table",
        "GPUs by name and MIG mode",
        "Each GPU of a sidecar with its name, driver and MIG mode (on: divided into instances), and its figures now.",
        "One driver version everywhere, and MIG only where you set it.",
        "A GPU whose only figure is 'seen' gives no readings: see the values that the driver could not give.",
        (
            _named(_ours(gpu.TEMPERATURE), "hottest sensor", Unit.CELSIUS),
            _named(_ours(gpu.POWER), "power", Unit.WATTS),
            _named(f"({promql.per(_ours(gpu.MEMORY_USED), _ours(gpu.MEMORY_TOTAL))})", "memory in use", Unit.RATIO),
            Query(_NAMES, "seen"),
        ),
        Shape.TABLE,
        width=24,
    ),
    Panel(
        "absent",
        "Values not available from the driver",
        "How many values could not be had at the last reading, by reason, all GPUs together.",
        "not_supported and not_available are gaps of the GPU and stay as they are.",
        "lost: a GPU fell off the bus. unknown_error on a GPU that was fine is a failure: read the kernel log and"
        " drain the host. permission: start the sidecar with access to the devices.",
        (
            Query(
                f"sum by (reason) ({_ours(gpu.ABSENT, 'reason')})", queries.legend(("reason",)), shown_unit(Unit.COUNT)
            ),
        ),
    ),
    Panel(
        "energy",
        "Power from the energy counter",
        "Watts as the growth of the GPU's energy counter: it misses no peak between two samples of the power. Where a"
        " GPU has no such counter the sidecar adds up its power over time.",
        "Close to the panel on power.",
        "A lasting gap between the two means that power is sampled too seldom for this load; believe this one.",
        (
            _line(f"max by (uuid) ({_ours_rate(gpu.ENERGY, 'method')})", Unit.JOULES, per_second=True),
            _line(_their_rate(dcgm.ENERGY), Unit.JOULES, per_second=True),
        ),
    ),
    Panel(
        "mig-activity",
        "Activity by MIG instance",
        "Share of the time in which an instance did any work.",
        "Instances that serve are active; the others are free to be given away.",
        "An instance that stays idle is paid for and unused: give it to another engine, or divide the GPU differently.",
        (
            _of_instances(_ours(gpu.MIG_ACTIVITY, "gpu_instance", only=_ANY_WORK), Unit.RATIO),
            _of_their_instances(_their_instances(dcgm.ENGINE_ACTIVE, gpu.MIG_ACTIVITY), Unit.RATIO),
        ),
        optional=(
            "Empty while no GPU is divided by MIG. Our sidecar reads this by NVML on Hopper and later; for Ampere run"
            " NVIDIA's dcgm-exporter."
        ),
    ),
    Panel(
        "mig-memory",
        "Memory in use by MIG instance, share",
        "Memory in use over what the instance has. Each instance has a part of its own, so one may be full while its"
        " neighbours are not.",
        "Flat, a little above the engine's --gpu-memory-utilization.",
        "Near 100 % the next allocation on that instance fails, whatever the GPU has free: see the page on full"
        " memory.",
        (
            _of_instances(
                promql.per(*(_ours(metric, "gpu_instance") for metric in (gpu.MIG_MEMORY_USED, gpu.MIG_MEMORY_TOTAL))),
                Unit.RATIO,
            ),
            _of_their_instances(
                promql.per(_PART_USED, f"({_PART_USED} + {_their_instances(dcgm.FB_FREE, gpu.MIG_MEMORY_USED)})"),
                Unit.RATIO,
            ),
        ),
        optional="Empty while no GPU is divided by MIG; else start the sidecar on the GPU host.",
    ),
    Panel(
        "nvlink-traffic",
        "NVLink traffic",
        "Payload over all NVLinks of a GPU, by direction.",
        "Alike on the GPUs of one tensor-parallel engine, and none on GPUs that work alone.",
        "One GPU far below its group has lost a link: compare its errors beside this, and see the page on the"
        " interconnect.",
        (_line(_ours_rate(gpu.NVLINK_BYTES, "direction"), Unit.BYTES, "{{direction}}", per_second=True),),
        optional=(
            "Empty on GPUs without NVLink, and where the sidecar reads GPUs by nvidia-smi; start it with access to"
            " NVML on the GPU host."
        ),
    ),
    Panel(
        "nvlink-errors",
        "NVLink errors",
        "Damaged packets, repeats and new trainings of the links between the GPUs, by GPU, in each interval.",
        "None; single repeats cost nothing that anyone would see.",
        "Every collective of a tensor-parallel engine waits for the worst link: compare with inter-token latency, and"
        " see the page on the interconnect.",
        (
            _line(_ours_growth(gpu.NVLINK_ERRORS, "kind"), Unit.COUNT, "{{kind}}"),
            _line(_their_links(dcgm.NVLINK_CRC), Unit.COUNT, "damaged"),
            _line(_their_links(dcgm.NVLINK_REPLAY), Unit.COUNT, "repeated"),
            _line(_their_links(dcgm.NVLINK_RECOVERY), Unit.COUNT, "trained again"),
        ),
        optional=(
            "Empty on GPUs without NVLink. Our sidecar reads links by NVML up to Hopper; elsewhere name the"
            " NVLINK_*_ERROR_COUNT_TOTAL fields in the counters file of dcgm-exporter."
        ),
    ),
    Panel(
        "profiling",
        "Engine and memory activity, by GPU",
        "Share of the time in which the compute engine was active, and of the cycles in which device memory moved data."
        " Finer than utilisation.",
        "Decode keeps memory high; prefill keeps the engine high.",
        "Both low under load: the GPUs wait for the host, the network or each other.",
        (
            _line(
                _same_key(promql.worst(dcgm.ENGINE_ACTIVE.metric, ("UUID",), (*_PLACE, 'GPU_I_ID=""'))),
                Unit.RATIO,
                "engine",
            ),
            _line(
                _same_key(promql.worst(dcgm.DRAM_ACTIVE.metric, ("UUID",), (*_PLACE, 'GPU_I_ID=""'))),
                Unit.RATIO,
                "memory",
            ),
        ),
        optional=(
            "Our sidecar does not read profiling fields; run NVIDIA's dcgm-exporter, which shows them on data-centre"
            " GPUs from Volta on."
        ),
    ),
)


def _needing(panels: tuple[Panel, ...]) -> tuple[Panel, ...]:
    return tuple(replace(panel, requires=PRESENT) for panel in panels)


BOARD = Dashboard(
    slug="gpu",
    title="vLLM / GPU",
    question="Are the GPUs healthy, busy and efficient?",
    rows=(
        DashboardRow("", _needing(_TOP)),
        DashboardRow("Memory and clocks", _needing(_MEMORY)),
        DashboardRow("Power and temperature", _needing(_HEAT_AND_POWER)),
        DashboardRow("Errors", _needing(_ERRORS)),
        DashboardRow("GPUs, energy, links, MIG and profiling", _needing(_MORE), collapsed=True),
    ),
)
