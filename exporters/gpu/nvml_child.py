"""Child process that reads NVML: a line in, one JSON line out. It is a process of its own because a call into a stuck
driver returns to nobody: it can only be killed, and here killing it costs nothing.

Invariant: pynvml is imported here and nowhere else, and nothing of this project is imported, so that a new child starts
in milliseconds. An answer is {"gpus": [fields of GpuReading], "xids": {uuid: [numbers since the last answer]}} or
{"error": reason, "why": sentence}; after an error the child ends. A GPU under MIG has "instances": [fields of
MigReading]."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

try:
    import pynvml
except ImportError:  # installed without it: the parent falls back to nvidia-smi
    pynvml = None

_PR_SET_PDEATHSIG = 1
_MEGAHERTZ = 1e6
_MOST_EVENTS = 100  # of one reading; the rest is for the next

# nvmlReturn_t, in words of the two vocabularies: why there is no answer at all, and why one value is absent.
_NO_ANSWER = {
    9: "no_driver",
    12: "no_driver",
    13: "no_driver",
    18: "no_driver",
    4: "permission",
    15: "lost",
    16: "lost",
}
_NO_VALUE = {
    3: "not_supported",
    4: "permission",
    13: "not_known",
    25: "not_known",
    26: "deprecated",
    6: "not_available",
    21: "not_available",
}
_CARD_GONE = {1, 15, 16}  # uninitialized, lost, reset required: no further call to this GPU makes sense
_NO_SUCH_PART = {2, 6}  # the driver counts the MIG devices that could be, not those that are

# Field ids that never moved (nvml.h, NVML_FI_DEV_*), their scope, and what they count in. The hw_ slowdowns are left
# out: they are 251 to 253 in some drivers and 269 to 271 in others, where 251 to 253 mean power smoothing; see
# event_reasons. NVLink's bytes are those since the driver was loaded, in KiB, and of all links when the scope is the
# largest number. Its errors have
# these ids up to
# Hopper.
_ALL_LINKS = 0xFFFFFFFF
_FIELD_VALUES = {
    74: (0, "throttle_sw_power_cap_seconds", 1e-9),
    75: (0, "throttle_sw_thermal_slowdown_seconds", 1e-9),
    76: (0, "throttle_sync_boost_seconds", 1e-9),
    82: (0, "memory_temperature_celsius", 1.0),
    38: (0, "nvlink_crc_flit_errors", 1.0),
    45: (0, "nvlink_crc_data_errors", 1.0),
    52: (0, "nvlink_replay_errors", 1.0),
    59: (0, "nvlink_recovery_errors", 1.0),
    138: (_ALL_LINKS, "nvlink_transmitted", 1024.0),
    139: (_ALL_LINKS, "nvlink_received", 1024.0),
}
_ASKED = [(field, scope) for field, (scope, _, _) in _FIELD_VALUES.items()]
_UNION = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t

# NVML_GPM_METRIC_*, in percent, from Hopper on.
_ACTIVITY = {1: "graphics_ratio", 2: "sm_ratio", 3: "occupancy_ratio", 5: "tensor_ratio", 10: "memory_ratio"}
_PROFILE = re.compile(r" MIG (?:\d+c\.)?(\S+)$")  # "NVIDIA H200 MIG 1c.3g.71gb": a compute instance of a 3g.71gb

Ask = Callable[[str, Callable[[], Any]], None]


def main() -> None:
    """Answer until stdin ends."""
    _die_with_parent()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the driver's library prints must not pass for an answer
    session = _Session()
    for _ in sys.stdin:
        answer = session.answer()
        out.write(json.dumps(answer) + "\n")
        out.flush()
        if "error" in answer:
            return


class _Session:
    """One nvmlInit, renewed after a GPU was lost, since a GPU that comes back is only seen by a new one."""

    def __init__(self) -> None:
        self.stale = True
        self.xids = _Xids()
        self.activity = _Activity()

    def answer(self) -> dict[str, Any]:
        if pynvml is None:
            return {"error": "no_driver", "why": "nvidia-ml-py is not installed"}
        try:
            if self.stale:
                pynvml.nvmlInit()
                self.xids, self.activity = _Xids(), _Activity()
                self.xids.listen()
            driver = _text(pynvml.nvmlSystemGetDriverVersion())
            gpus = [_gpu_reading(index, driver, self.activity) for index in range(pynvml.nvmlDeviceGetCount())]
            heard = self.xids.heard()
            self.stale = any("gpu" in gpu["absent"] for gpu in gpus)
            if self.stale:
                self.xids.close()
                self.activity.close()
                pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            return {"error": _NO_ANSWER.get(error.value, "exit"), "why": f"NVML: {error}"}
        return {"gpus": gpus, "xids": heard}


class _Xids:
    """The driver's own error numbers, as events. Each is delivered once; a missed one is lost."""

    def __init__(self) -> None:
        self._events: Any = None
        self._uuids: dict[int | None, str] = {}

    def listen(self) -> None:
        """GPUs that do not tell, or may not, have no list."""
        try:
            self._events = pynvml.nvmlEventSetCreate()
            for index in range(pynvml.nvmlDeviceGetCount()):
                self._listen_to(index)
        except pynvml.NVMLError:
            self._events = None

    def _listen_to(self, index: int) -> None:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except pynvml.NVMLError:
            return
        self._uuids[_address(handle)] = uuid

    def heard(self) -> dict[str, list[int]]:
        """Return the XIDs since the last call, by GPU. Does not wait."""
        found: dict[str, list[int]] = {uuid: [] for uuid in self._uuids.values()}
        for _ in range(_MOST_EVENTS if self._events is not None else 0):
            try:
                event = pynvml.nvmlEventSetWait(self._events, 0)
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_TIMEOUT:
                    self._events = None  # until the next session
                break
            if uuid := self._uuids.get(_address(event.device)):
                found[uuid].append(event.eventData)
        return found

    def close(self) -> None:
        if self._events is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._events)


class _Activity:
    """Activity of MIG instances: what lies between two samples of their counters, so there is none before the
    second."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], Any] = {}

    def shares(self, gpu: Any, uuid: str, instance: int) -> dict[str, tuple[int, float]]:
        """By name: why there is no share (0: there is one), and percent."""
        try:
            if not pynvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
                _raise(pynvml.NVML_ERROR_NOT_SUPPORTED)
            now = self._sampled(gpu, instance)
            before, self._last[uuid, instance] = self._last.get((uuid, instance)), now
            if before is None:
                _raise(pynvml.NVML_ERROR_NO_DATA)
            return self._between(before, now)
        except pynvml.NVMLError as error:
            if error.value in _CARD_GONE:
                raise
            return dict.fromkeys(_ACTIVITY.values(), (error.value, 0.0))

    def close(self) -> None:
        for sample in self._last.values():
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(sample)

    def _sampled(self, gpu: Any, instance: int) -> Any:
        sample = pynvml.nvmlGpmSampleAlloc()
        try:
            return pynvml.nvmlGpmMigSampleGet(gpu, instance, sample)
        except pynvml.NVMLError:
            pynvml.nvmlGpmSampleFree(sample)
            raise

    def _between(self, before: Any, now: Any) -> dict[str, tuple[int, float]]:
        asked = pynvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics, asked.sample1, asked.sample2 = (
            pynvml.NVML_GPM_METRICS_GET_VERSION,
            len(_ACTIVITY),
            before,
            now,
        )
        for i, metric in enumerate(_ACTIVITY):
            asked.metrics[i].metricId = metric
        try:
            pynvml.nvmlGpmMetricsGet(asked)
        finally:
            pynvml.nvmlGpmSampleFree(before)
        return {
            name: (asked.metrics[i].nvmlReturn, asked.metrics[i].value) for i, name in enumerate(_ACTIVITY.values())
        }


def _gpu_reading(index: int, driver: str, activity: _Activity) -> dict[str, Any]:
    """Return all that NVML reports of one GPU. A GPU that is gone leaves its index and absent["gpu"]; the others are
    not its victims."""
    try:
        return _values(pynvml.nvmlDeviceGetHandleByIndex(index), index, driver, activity)
    except pynvml.NVMLError as error:
        return {"uuid": "", "index": index, "absent": {"gpu": "permission" if error.value == 4 else "lost"}}


def _asking(found: dict[str, Any]) -> Ask:
    """A way to put one call's values into `found` under their names, or the reason why there are none."""

    def ask(names: str, question: Callable[[], Any]) -> None:
        try:
            values = question()
        except pynvml.NVMLError as error:
            if error.value in _CARD_GONE:
                raise
            found["absent"].update(dict.fromkeys(names.split(), _NO_VALUE.get(error.value, "unknown_error")))
        else:
            for name, value in zip(names.split(), values, strict=True):
                if isinstance(value, float) and not math.isfinite(value):  # JSON has no word for it
                    found["absent"][name] = "implausible"
                else:
                    found[name] = value

    return ask


def _values(handle: Any, index: int, driver: str, activity: _Activity) -> dict[str, Any]:
    nvml = pynvml
    gpu: dict[str, Any] = {
        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
        "index": index,
        "driver_version": driver,
        "absent": {},
    }
    ask = _asking(gpu)
    ask("name", lambda: [_text(nvml.nvmlDeviceGetName(handle))])
    ask("pci_bus_id", lambda: [_text(nvml.nvmlDeviceGetPciInfo(handle).busId)])
    ask("mig", lambda: [nvml.nvmlDeviceGetMigMode(handle)[0] == 1])
    ask("utilization_ratio memory_busy_ratio", lambda: _utilization(handle))
    _memory(handle, ask)
    ask("power_watts", lambda: [nvml.nvmlDeviceGetPowerUsage(handle) / 1e3])
    ask("power_limit_watts", lambda: [nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3])
    ask("energy_joules", lambda: [nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3])
    ask("temperature_celsius", lambda: _temperature(handle))
    ask("sm_clock_hertz", lambda: [nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * _MEGAHERTZ])
    ask("mem_clock_hertz", lambda: [nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) * _MEGAHERTZ])
    ask("event_reasons", lambda: _event_reasons(handle))
    ask("ecc_corrected", lambda: [nvml.nvmlDeviceGetTotalEccErrors(handle, 0, nvml.NVML_AGGREGATE_ECC)])
    ask("ecc_uncorrected", lambda: [nvml.nvmlDeviceGetTotalEccErrors(handle, 1, nvml.NVML_AGGREGATE_ECC)])
    ask("remapped_corrected remapped_uncorrected", lambda: nvml.nvmlDeviceGetRemappedRows(handle)[:2])
    answers = _field_values(handle)
    for field, (_, name, scale) in _FIELD_VALUES.items():
        ask(name, partial(_field_value, answers.get(field), scale))
    if gpu.get("mig"):
        ask("instances", lambda: [_instances(handle, gpu["uuid"], activity)])
    return gpu


def _instances(gpu: Any, uuid: str, activity: _Activity) -> list[dict[str, Any]]:
    """The GPU instances of a divided GPU. Compute instances of one of them share its memory and would count it
    twice."""
    parts: dict[int, Any] = {}
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except pynvml.NVMLError as error:
            if error.value not in _NO_SUCH_PART:
                raise
            continue
        parts.setdefault(pynvml.nvmlDeviceGetGpuInstanceId(part), part)
    found = [_instance(part, uuid, number) for number, part in parts.items()]
    # after all memory was read: another collector's source says that these calls may disturb that one
    for instance in found:
        ask = _asking(instance)
        for name, answer in activity.shares(gpu, uuid, instance["gpu_instance"]).items():
            ask(name, partial(_share, *answer))
    return found


def _instance(part: Any, uuid: str, number: int) -> dict[str, Any]:
    instance: dict[str, Any] = {"uuid": uuid, "gpu_instance": number, "absent": {}}
    ask = _asking(instance)
    ask("mig_uuid", lambda: [_text(pynvml.nvmlDeviceGetUUID(part))])
    ask("profile", lambda: [_profile(_text(pynvml.nvmlDeviceGetName(part)))])
    _memory(part, ask)
    return instance


def _profile(name: str) -> str:
    found = _PROFILE.search(name)
    return found[1] if found else name


def _share(code: int, percent: float) -> list[float]:
    """Rounding may lift a full instance a little above 100; what is far above is not a share."""
    if code:
        _raise(code)
    return [(min(percent, 100.0) if percent < 101 else percent) / 100]


def _event_reasons(handle: Any) -> list[int]:
    """Drivers before 535 know the call by its older name."""
    try:
        return [pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)]
    except pynvml.NVMLError_FunctionNotFound:
        return [pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)]


def _utilization(handle: Any) -> list[float]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return [rates.gpu / 100, rates.memory / 100]


def _memory(handle: Any, ask: Ask) -> None:
    """Version 2 of the call reports reserved memory apart; drivers before 510 only know the first, whose used holds
    both."""
    try:
        m = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        ask(
            "memory_used_bytes memory_free_bytes memory_total_bytes memory_reserved_bytes",
            lambda: [m.used, m.free, m.total, m.reserved],
        )
    except pynvml.NVMLError as error:
        if error.value in _CARD_GONE:
            raise
        ask("memory_used_bytes memory_free_bytes memory_total_bytes", lambda: _memory_v1(handle))
        ask("memory_reserved_bytes", partial(_raise, error.value))


def _memory_v1(handle: Any) -> list[int]:
    m = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return [m.used, m.free, m.total]


def _temperature(handle: Any) -> list[float]:
    """The first call is announced to go with CUDA 14; drivers before 560 do not know the second."""
    try:
        return [pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)]
    except pynvml.NVMLError_FunctionNotFound:
        return [pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU)]


def _field_values(handle: Any) -> dict[int, Any]:
    try:
        return {answer.fieldId: answer for answer in pynvml.nvmlDeviceGetFieldValues(handle, _ASKED)}
    except pynvml.NVMLError as error:
        if error.value in _CARD_GONE:
            raise
        return {}


def _field_value(answer: Any, scale: float) -> list[float]:
    if answer is None or answer.valueType >= len(_UNION):
        _raise(pynvml.NVML_ERROR_NOT_SUPPORTED)
    if answer.nvmlReturn:
        _raise(answer.nvmlReturn)
    return [getattr(answer.value, _UNION[answer.valueType]) * scale]


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _raise(code: int) -> Any:
    raise pynvml.NVMLError(code)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _die_with_parent() -> None:
    """A child that hangs in the driver must not outlive a parent that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
