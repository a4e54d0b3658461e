"""The child process that asks NVML: a line in, one JSON line out. It is a process of its own because a call into a stuck driver
returns to nobody: it can only be killed, and here killing it costs nothing.

Law: pynvml is imported here and nowhere else, and nothing of this project is imported, so that a new child starts in milliseconds.
An answer is {"gpus": [fields of GpuReading]} or {"error": reason, "why": sentence}; after an error the child ends."""

from __future__ import annotations

import ctypes
import json
import os
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

# nvmlReturn_t, in words of the two vocabularies: why there is no answer at all, and why one value is absent.
_NO_ANSWER = {9: "no_driver", 12: "no_driver", 13: "no_driver", 18: "no_driver", 4: "permission", 15: "lost", 16: "lost"}
_NO_VALUE = {
    3: "not_supported",
    4: "permission",
    13: "not_known",
    25: "not_known",
    26: "deprecated",
    6: "not_available",
    21: "not_available",
}
_CARD_GONE = {1, 15, 16}  # uninitialized, lost, reset required: no further call to this card makes sense

# Field ids that never moved (nvml.h, NVML_FI_DEV_PERF_POLICY_*), nanoseconds. The hw_ slowdowns are left out: they are 251 to 253 in
# some drivers and 269 to 271 in others, where 251 to 253 mean power smoothing.
_FIELD_VALUES = {
    74: ("throttle_sw_power_cap_seconds", 1e-9),
    75: ("throttle_sw_thermal_slowdown_seconds", 1e-9),
    76: ("throttle_sync_boost_seconds", 1e-9),
    82: ("memory_temperature_celsius", 1.0),
}
_UNION = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t


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
    """One nvmlInit, renewed after a card was lost, since a card that comes back is only seen by a new one."""

    def __init__(self) -> None:
        self.stale = True

    def answer(self) -> dict[str, Any]:
        if pynvml is None:
            return {"error": "no_driver", "why": "nvidia-ml-py is not installed"}
        try:
            if self.stale:
                pynvml.nvmlInit()
            driver = _text(pynvml.nvmlSystemGetDriverVersion())
            cards = [_card(index, driver) for index in range(pynvml.nvmlDeviceGetCount())]
            self.stale = any("gpu" in card["absent"] for card in cards)
            if self.stale:
                pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            return {"error": _NO_ANSWER.get(error.value, "exit"), "why": f"NVML: {error}"}
        return {"gpus": cards}


def _card(index: int, driver: str) -> dict[str, Any]:
    """All that one card tells. A card that is gone leaves its index and absent["gpu"]; the others are not its victims."""
    try:
        return _values(pynvml.nvmlDeviceGetHandleByIndex(index), index, driver)
    except pynvml.NVMLError as error:
        return {"uuid": "", "index": index, "absent": {"gpu": "permission" if error.value == 4 else "lost"}}


def _values(handle: Any, index: int, driver: str) -> dict[str, Any]:
    nvml = pynvml
    card: dict[str, Any] = {"uuid": _text(nvml.nvmlDeviceGetUUID(handle)), "index": index, "driver_version": driver, "absent": {}}

    def ask(names: str, question: Callable[[], Any]) -> None:
        """Put one call's values under their names, or the reason why there are none."""
        try:
            values = question()
        except nvml.NVMLError as error:
            if error.value in _CARD_GONE:
                raise
            card["absent"].update(dict.fromkeys(names.split(), _NO_VALUE.get(error.value, "unknown_error")))
        else:
            card.update(zip(names.split(), values, strict=True))

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
    ask("ecc_corrected", lambda: [nvml.nvmlDeviceGetTotalEccErrors(handle, 0, nvml.NVML_AGGREGATE_ECC)])
    ask("ecc_uncorrected", lambda: [nvml.nvmlDeviceGetTotalEccErrors(handle, 1, nvml.NVML_AGGREGATE_ECC)])
    ask("remapped_corrected remapped_uncorrected", lambda: nvml.nvmlDeviceGetRemappedRows(handle)[:2])
    answers = _field_values(handle)
    for field, (name, scale) in _FIELD_VALUES.items():
        ask(name, partial(_field_value, answers.get(field), scale))
    return card


def _utilization(handle: Any) -> list[float]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return [rates.gpu / 100, rates.memory / 100]


def _memory(handle: Any, ask: Callable[[str, Callable[[], Any]], None]) -> None:
    """Version 2 of the call tells reserved memory apart; drivers before 510 only know the first, whose used holds both."""
    try:
        m = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        ask("memory_used_bytes memory_free_bytes memory_total_bytes memory_reserved_bytes", lambda: [m.used, m.free, m.total, m.reserved])
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
        return {answer.fieldId: answer for answer in pynvml.nvmlDeviceGetFieldValues(handle, list(_FIELD_VALUES))}
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
