"""GPU readings by NVML in a child process that can be killed, or by nvidia-smi where NVML is missing.

Invariant: missing values are omitted, never reported as 0. A driver that hangs costs one deadline and the loop goes on.
The child is killed only after `kill_after_s`: a driver that handles a fault stalls for seconds, and an XID that a
killed child has not reported is lost. Where the kernel does not let a child die (state D), no second one is started."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from exporters.gpu import nvidia_smi
from exporters.gpu.child_process import ChildProcess, read_output
from exporters.gpu.readings import GpuReading, GpuUnavailable, Integral, plausible
from exporters.gpu.series import THROTTLES
from vllm_watch import module_command

log = logging.getLogger(__name__)

NVML_COMMAND = module_command("exporters.gpu.nvml_child")
SMI_COMMAND = ("nvidia-smi",)

# An H100 (driver 580) answered nothing for more than 2 s while it handled an XID 31.
KILL_AFTER_S = 8.0
_MOST_BACKOFF_S = 30.0
_LETTING_GO_S = 0.2  # how long a killed child is waited for; one in state D stays longer


class _Answer(msgspec.Struct, frozen=True):
    """Answer of the NVML child; see exporters/gpu/nvml_child.py."""

    gpus: list[GpuReading] = []  # msgspec copies it
    xids: dict[str, list[int]] = {}
    error: str | None = None
    why: str = ""


_answers = msgspec.json.Decoder(_Answer)


class GpuSource:
    """Readings of all GPUs, from whichever of NVML and nvidia-smi answers.

    nvml, smi: the commands to run. env: their environment, ours by default. clock: seconds that never go back.
    backoff_s: pause after a first failure, doubled each time up to 30 s; reads in between fail at once, with the same
    reason.
    reprobe_s: how often a missing driver, or NVML behind a working nvidia-smi, is looked for again.
    kill_after_s: age of an unanswered request from which its child is killed at a deadline.
    energy_gap_s: see Integral; keep it above the time between two reads."""

    def __init__(
        self,
        nvml: Sequence[str] = NVML_COMMAND,
        smi: Sequence[str] = SMI_COMMAND,
        env: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        backoff_s: float = 1.0,
        reprobe_s: float = 30.0,
        energy_gap_s: float = 30.0,
        kill_after_s: float = KILL_AFTER_S,
    ) -> None:
        self.method: Literal["nvml", "nvidia-smi"] | None = None
        self._nvml, self._smi, self._env, self._clock = nvml, smi, env, clock
        self._backoff_s, self._reprobe_s, self._energy_gap_s = backoff_s, reprobe_s, energy_gap_s
        self._kill_after_s = kill_after_s
        self._busy = asyncio.Lock()
        self._child: ChildProcess | None = None
        self._pending: asyncio.Future[bytes] | None = None  # request without an answer; its read may have given up
        self._asked_at = 0.0
        self._dying: list[ChildProcess] = []
        self._no_nvml_before = self._nothing_before = 0.0
        self._failures = 0
        self._last: GpuUnavailable | None = None
        self._unknown_fields: set[str] = set()
        self._known: dict[str, GpuReading] = {}
        self._integrals: dict[tuple[str, str], Integral] = {}
        self._xids: dict[str, Counter[int]] = {}

    async def __aenter__(self) -> GpuSource:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop what runs; a child that the kernel holds is left to it."""
        self._drop_child()
        await self._reap()

    async def read(self, deadline_s: float = 2.0) -> list[GpuReading]:
        """One reading per GPU. Raises GpuUnavailable, at the latest a moment after the deadline.

        The first read after a start also loads the driver, which takes seconds where no process holds it open: give it
        longer."""
        await self._refuse_while_waiting()
        try:
            async with asyncio.timeout(deadline_s), self._busy:
                readings = await self._sample()
        except TimeoutError:
            await self._reap()
            raise self._failed(
                GpuUnavailable("hang", f"the GPU driver did not answer within {deadline_s:g} s")
            ) from None
        except GpuUnavailable as error:
            await self._reap()
            raise self._failed(error) from error.__cause__
        self._failures, self._last = 0, None
        return self._finished(readings)

    async def _refuse_while_waiting(self) -> None:
        await self._reap()
        if self._dying:
            pid = self._dying[0].process.pid
            raise GpuUnavailable(
                "hang", f"the killed process {pid} is still held by the GPU driver; no new one is started until it ends"
            )
        if self._last and (wait_s := self._nothing_before - self._clock()) > 0:
            raise GpuUnavailable(self._last.reason, f"{self._last.why}; next try in {wait_s:.0f} s")

    def _failed(self, error: GpuUnavailable) -> GpuUnavailable:
        """Note a failure and when to try again."""
        self._failures += 1
        backoff_s = min(self._backoff_s * 2 ** min(self._failures - 1, 10), _MOST_BACKOFF_S)
        self._nothing_before = self._clock() + (self._reprobe_s if error.reason == "no_driver" else backoff_s)
        self._last = error
        return error

    def _finished(self, readings: Iterable[GpuReading]) -> list[GpuReading]:
        """Name lost GPUs after what was known of them, integrate what nobody counts, and let a uuid appear once."""
        now = self._clock()
        found: dict[str, GpuReading] = {}
        for raw in readings:
            reading = plausible(self._recalled(raw) if "gpu" in raw.absent else raw)
            if reading.uuid not in found:
                parts = tuple(map(plausible, reading.instances))
                counted = self._with_held(self._with_energy(reading, now), now)
                heard = self._xids.get(reading.uuid)
                found[reading.uuid] = replace(counted, instances=parts, xids=None if heard is None else dict(heard))
        self._known |= {uuid: reading for uuid, reading in found.items() if "gpu" not in reading.absent}
        return list(found.values())

    def _recalled(self, lost: GpuReading) -> GpuReading:
        """A lost GPU has only an index or a bus id left; its name is in our memory."""
        bus = (lost.pci_bus_id or "-").lower()[-10:]
        for known in self._known.values():
            if (lost.index is not None and known.index == lost.index) or (known.pci_bus_id or "").lower().endswith(bus):
                return GpuReading(
                    known.uuid,
                    known.index,
                    known.name,
                    known.driver_version,
                    known.pci_bus_id,
                    known.mig,
                    absent=lost.absent,
                )
        return replace(lost, uuid=lost.pci_bus_id or f"index:{lost.index}")

    def _with_energy(self, reading: GpuReading, now: float) -> GpuReading:
        if reading.energy_joules is not None:
            return replace(reading, energy_method="counter")
        if reading.power_watts is None:
            return reading
        joules = self._integral(reading.uuid, "energy_joules").add(reading.power_watts, now)
        absent = {name: why for name, why in reading.absent.items() if name != "energy_joules"}
        return replace(reading, energy_joules=joules, energy_method="integrated", absent=absent)

    def _with_held(self, reading: GpuReading, now: float) -> GpuReading:
        """The two hw_ slowdowns, where the driver says only whether they hold now."""
        if reading.event_reasons is None:
            return reading
        for reason in ("hw_thermal_slowdown", "hw_power_brake"):
            name = f"throttle_{reason}_seconds"
            if getattr(reading, name) is None:
                held_s = self._integral(reading.uuid, name).add(
                    float(bool(reading.event_reasons & THROTTLES[reason])), now
                )
                absent = {n: why for n, why in reading.absent.items() if n != name}
                reading = replace(reading, absent=absent, **{name: held_s})  # type: ignore[arg-type]
        return reading

    def _integral(self, uuid: str, name: str) -> Integral:
        return self._integrals.setdefault((uuid, name), Integral(self._energy_gap_s))

    async def _sample(self) -> list[GpuReading]:
        if self._child is None and self._clock() < self._no_nvml_before:
            return await self._read_smi()
        try:
            return await self._read_nvml()
        except GpuUnavailable as no_nvml:
            if no_nvml.reason != "no_driver":
                raise
            self._no_nvml_before = self._clock() + self._reprobe_s
            try:
                return await self._read_smi()
            except GpuUnavailable as no_smi:
                if no_smi.reason != "no_driver":
                    raise
                raise GpuUnavailable(
                    "no_driver", f"{no_nvml.why}; {no_smi.why}; without an NVIDIA driver there are no GPU series"
                ) from None

    # NVML, by the child

    async def _read_nvml(self) -> list[GpuReading]:
        try:
            line = await self._ask_child()
            if not line:
                raise GpuUnavailable("exit", await self._obituary())
            answer = _answers.decode(line)
        except msgspec.DecodeError as error:
            self._drop_child()
            raise GpuUnavailable("parse", f"the NVML process answered what is no reading: {error}") from error
        except asyncio.CancelledError:  # a deadline, above all
            if self._pending is None or self._clock() - self._asked_at >= self._kill_after_s:
                self._drop_child()
            raise
        except BaseException:  # half an answer must not meet the next request
            self._drop_child()
            raise
        if answer.error:
            self._drop_child()
            raise GpuUnavailable(answer.error, answer.why)
        self._hear(answer.xids)
        if not answer.gpus or all("gpu" in reading.absent for reading in answer.gpus):
            raise GpuUnavailable(
                "lost", f"NVML answers, but none of its {len(answer.gpus)} GPUs can be read; see 'dmesg | grep -i xid'"
            )
        self.method = "nvml"
        return answer.gpus

    def _hear(self, xids: Mapping[str, Sequence[int]]) -> None:
        for uuid, heard in xids.items():
            self._xids.setdefault(uuid, Counter()).update(heard)
            if heard:
                log.warning("GPU %s: the driver reports XID %s", uuid, ", ".join(map(str, heard)))

    async def _ask_child(self) -> bytes:
        """One request, one line; empty when the child ended. The child is started when there is none."""
        try:
            if self._child is None:
                self._child = await ChildProcess.start(self._nvml, self._env, asyncio.subprocess.PIPE)
            late = self._pending is not None
            line = await self._answered(self._child)
            if late and line and not (answer := _answers.decode(line)).error:
                self._hear(answer.xids)  # its values are those of an earlier read, so ask again
                line = await self._answered(self._child)
            return line
        except ConnectionError:
            return b""
        except OSError as error:
            raise GpuUnavailable("exit", f"the NVML process cannot be started: {error}") from error
        except ValueError as error:
            raise GpuUnavailable("parse", f"the NVML process answered without an end: {error}") from error

    async def _answered(self, child: ChildProcess) -> bytes:
        """The answer to the pending request, or to a new one. A cancelled wait leaves the request pending."""
        if self._pending is None:
            stdin = child.process.stdin
            assert stdin is not None  # noqa: S101  # it was started with a pipe
            stdin.write(b"read\n")
            await stdin.drain()
            self._pending, self._asked_at = asyncio.ensure_future(child.out.readline()), self._clock()
        line = await asyncio.shield(self._pending)
        self._pending = None
        return line

    async def _obituary(self) -> str:
        if self._child is None:
            return "the NVML process ended"
        said = (await read_output(self._child.err)).strip().split("\n")[-1]
        return f"the NVML process ended with code {await self._child.process.wait()}: {said[:200] or 'it said nothing'}"

    # nvidia-smi

    async def _read_smi(self) -> list[GpuReading]:
        """Ask for all fields; a driver that does not know one refuses them all and names it, so ask again without
        it."""
        for _ in nvidia_smi.FIELDS:
            asked = [name for name in nvidia_smi.FIELDS if name not in self._unknown_fields]
            code, out, err = await self._run_smi(f"--query-gpu={','.join(asked)}", "--format=csv,noheader,nounits")
            refused = nvidia_smi.refused_fields(out + err, asked)
            if not refused:
                break
            log.info("nvidia-smi does not know %s; going on without", ", ".join(sorted(refused)))
            self._unknown_fields |= refused
        readings = nvidia_smi.readings_of(code, out, err, asked)
        self.method = "nvidia-smi"
        return [replace(r, absent={**r.absent, "instances": "needs_nvml"}) if r.mig else r for r in readings]

    async def _run_smi(self, *arguments: str) -> tuple[int, str, str]:
        try:
            program = await ChildProcess.start((*self._smi, *arguments), self._env, asyncio.subprocess.DEVNULL)
        except PermissionError as error:
            raise GpuUnavailable("permission", f"{self._smi[0]} may not be run: {error}") from error
        except OSError as error:
            raise GpuUnavailable("no_driver", f"{self._smi[0]} cannot be run: {error.strerror or error}") from error
        try:
            out, err = await asyncio.gather(read_output(program.out), read_output(program.err))
            code = await program.process.wait()
        except BaseException:
            self._end(program)
            raise
        program.close_pipes()
        return code, out, err

    # ends

    def _drop_child(self) -> None:
        if self._pending:
            self._pending.cancel()
            self._pending = None
        if self._child:
            self._end(self._child)
            self._child = None

    def _end(self, program: ChildProcess) -> None:
        program.kill()
        self._dying.append(program)

    async def _reap(self) -> None:
        """Wait a moment for what was killed."""
        ends = [asyncio.ensure_future(program.process.wait()) for program in self._dying]
        if ends:
            _, held = await asyncio.wait(ends, timeout=_LETTING_GO_S)
            for end in held:
                end.cancel()
        self._dying = [program for program in self._dying if program.process.returncode is None]
