"""Bench runner: runs workloads against engines and records each run.

Invariant: measurements are kept, whatever happens next: each run is on disk before the next one begins, and an
incomplete one has the reason."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shlex
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp

from exporters.catalogue.exposition_parser import Exposition
from stack.bench import measurements, result, workload, workload_plan
from stack.bench.engine_under_test import (
    BadTarget,
    Peak,
    Subject,
    empty_prefix_cache,
    has_restarted,
    http_session,
    scrape,
    scrape_settled,
)
from stack.bench.load import BenchTarget, Done, LoadRun, Prepared
from stack.bench.measurements import Around
from stack.bench.prompts import NoTokenizer, Remote, Writer
from stack.bench.result import Bench, BenchVariant, Run, Start
from stack.bench.workload import LoadLevel, Workload

DEAD_AFTER = 10  # requests in a row that reach nobody
UNREACHED = ("connect_failed", "connect_timeout", "connection_lost")
WARM_UP = -1  # number of the uncounted warm-up run; no other run sends its prompts


class RunObserver(Protocol):
    """Receiver of progress."""

    def run(self, number: int, of: int, variant: str, workload: Workload, point: LoadLevel, asked: int) -> None: ...

    def done(self, done: Done) -> None: ...

    def ended(self, run: Run) -> None: ...


@dataclass(frozen=True, slots=True)
class RunStep:
    """Planned run. round: how often each variant had this load before."""

    round: int
    variant: str
    workload: Workload
    point: LoadLevel


def schedule(
    workloads: Sequence[Workload],
    points: Callable[[Workload], Sequence[LoadLevel]],
    turns: Sequence[Sequence[str]],
    runs: int | None,
    together: bool,
) -> list[RunStep]:
    """Return all runs in their order.

    turns: the order of the variants in each round, at least as many rounds as runs; `stack.tuning.turns` draws it.
    runs: of each load; None: as its workload says. together: all engines stand at once, so that the variants of one
    load follow each other directly."""
    steps = []
    for round_, variants in enumerate(turns[: rounds_of(workloads, runs)]):
        loads = [(each, point) for each in workloads if round_ < (runs or each.runs) for point in points(each)]
        if together:
            steps += [RunStep(round_, variant, workload, point) for workload, point in loads for variant in variants]
        else:
            steps += [RunStep(round_, variant, workload, point) for variant in variants for workload, point in loads]
    return steps


def rounds_of(workloads: Sequence[Workload], runs: int | None) -> int:
    """Return how many rounds the runs of these workloads take."""
    return runs or max(each.runs for each in workloads)


class BenchStopped(Exception):
    """The bench cannot go on; the message says why."""


@dataclass(slots=True)
class Bencher:
    """Running bench: `steps` one after the other, each against the engine of its variant; results are in `folder`.

    names: of all variants, the one that others are compared with first, whichever of them runs first; without them, in
    the order of their first runs. subject: gives the engine of a variant, started if need be; starts: how long its
    starts took. seed: what all prompts and lengths follow from."""

    folder: Path
    title: str
    tool: str
    workloads: Sequence[Workload]
    steps: Sequence[RunStep]
    subject: Callable[[str], Any]
    observer: RunObserver
    seed: int
    names: Sequence[str] = ()
    order: Literal["single", "interleaved", "sequential"] = "single"
    scale: float = 1.0
    starts: Callable[[str], Sequence[Start]] = lambda _: ()
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    variants: dict[str, BenchVariant] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    caveats: dict[str, None] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    started_s: float = field(default_factory=time.time)
    cut: str | None = "it did not come to its end"  # stays so in the file of a bench that was killed
    _warm: set[tuple[str, float | None, str, str]] = field(default_factory=set)
    _writers: dict[str, Writer] = field(default_factory=dict)

    async def go(self) -> Bench:
        """Run all steps and return what was measured, also where it broke off. Raises BadTarget and NoTokenizer where
        there is nothing."""
        try:
            for number, step in enumerate(self.steps, 1):
                await self._step(number, step)
            self.cut = None
        except BenchStopped as reason:
            self.cut = str(reason)
        except asyncio.CancelledError:
            self.cut = "it was stopped by hand"
        except Exception as error:
            self.cut = str(error)
            if not self.runs:
                raise
            if not isinstance(error, BadTarget | NoTokenizer):
                self._write()
                raise
        return self._write()

    def bench(self) -> Bench:
        """Return the bench so far."""
        names = [*self.names, *self.variants]
        slos = [workload.slo for workload in self.workloads]
        slo = slos[0].limits if all(each == slos[0] for each in slos) else {}
        return Bench(
            id=self.id,
            title=self.title,
            tool=self.tool,
            started_s=self.started_s,
            ended_s=time.time(),
            variants=tuple(sorted(self.variants.values(), key=lambda variant: names.index(variant.name))),
            runs=tuple(self.runs),
            workloads=tuple(workload.resolved(each) for each in self.workloads),
            workload_hash=workload.hash_of(self.workloads),
            order=self.order,
            seed=self.seed,
            scale=self.scale,
            slo=slo,
            hardware=_hardware(),
            caveats=tuple(self.caveats),
            events=tuple(self.events),
            cut=self.cut,
        )

    def _write(self) -> Bench:
        found = self.bench()
        result.write(self.folder, found)
        return found

    async def _step(self, number: int, step: RunStep) -> None:
        subject: Subject = await self.subject(step.variant)
        self.variants[step.variant] = BenchVariant(
            name=step.variant, engine=subject.engine, what=subject.what, starts=tuple(self.starts(step.variant))
        )
        async with http_session() as session:
            writer = await self._writer(session, subject)
            await self._warm_up(session, writer, subject, step)
            asks = workload_plan.plan(step.workload, step.point, self._lengths(step), number)
            prepared = await self._prepared(writer, step.workload, asks, number)
            self.observer.run(number, len(self.steps), step.variant, step.workload, step.point, len(asks))
            run = await self._run(session, subject, step, number, prepared)
        self.runs.append(run)
        self._write()
        self.observer.ended(run)
        if run.cut:
            raise BenchStopped(run.cut)

    async def _writer(self, session: aiohttp.ClientSession, subject: Subject) -> Writer:
        """Return the writer of an engine's address, made once: the same model has the same tokens."""
        remote = Remote(session, subject.target.url, subject.target.model, subject.target.key)
        known = self._writers.get(subject.target.url)
        writer = known.through(remote) if known else await Writer.of(remote, subject.target.model, self.id, self.seed)
        self._writers[subject.target.url] = writer
        return writer

    def _lengths(self, step: RunStep) -> int:
        """Return the seed of lengths and times: the same for all variants of a round."""
        return self.seed + (step.round if step.workload.seed == "fresh" else 0)

    async def _prepared(
        self, writer: Writer, its: Workload, asks: Sequence[workload_plan.PlannedRequest], number: int
    ) -> list[Prepared]:
        options = {"ignore_eos": True} if its.ignore_eos else {}
        instruction = f"{its.json.instruction}\n{json.dumps(its.json.schema)}" if its.json else ""
        return await writer.prepare(asks, number, its.endpoint, options, instruction)

    async def _warm_up(self, session: aiohttp.ClientSession, writer: Writer, subject: Subject, step: RunStep) -> None:
        """Send a few uncounted requests, once for each start of an engine and workload. With `cache: warm` all shared
        prefixes, for each load, since a longer run has more of them."""
        warm = step.workload.cache == "warm"
        key = (subject.target.url, subject.engine.started_s, step.workload.name, step.point.label if warm else "")
        if key in self._warm:
            return
        asks = list(workload_plan.plan(step.workload, step.point, self._lengths(step), WARM_UP))
        some = asks[: step.workload.warm_up]
        if warm:
            first = {ask.segments[0].key: ask for ask in reversed(asks) if len(ask.segments) > 1}
            some += [ask for ask in first.values() if ask not in some]
        alone = [
            workload_plan.PlannedRequest(
                number=at, kind=None, segments=a.segments, output_tokens=min(a.output_tokens, 16)
            )
            for at, a in enumerate(some)
        ]
        if alone:
            load, before = LoadRun(self._target(subject, step.workload)), await scrape(session, subject)
            await load.send(await self._prepared(writer, step.workload, alone, WARM_UP), 2)
            if all(done.record.outcome != "ok" for done in load.done):
                reason = load.done[0].record.reason or ""
                raise BenchStopped(
                    f"no request of the warm-up was answered by {subject.target.url}: {_why(reason, load.said)}"
                )
            # none of them counts in the run
            await scrape_settled(session, subject, before, sum(done.record.outcome == "ok" for done in load.done))
        self._warm.add(key)

    def _target(self, subject: Subject, its: Workload) -> BenchTarget:
        return BenchTarget(subject.target.url, subject.target.model, subject.target.key, its.timeout_s)

    async def _run(
        self, session: aiohttp.ClientSession, subject: Subject, step: RunStep, number: int, prepared: Sequence[Prepared]
    ) -> Run:
        its = step.workload
        course = _Course(subject, self._target(subject, its), step, prepared, self.observer.done)
        if its.cache == "cold":
            await empty_prefix_cache(session, subject)
        before, peak = await scrape(session, subject), Peak()
        watching = asyncio.create_task(peak.watch(subject, lambda: scrape(session, subject)))
        started_s, began = time.time(), time.monotonic()
        try:
            await course.send()
        finally:
            watching.cancel()
        seconds = time.monotonic() - began
        course.set_cut()
        around = await course.around(session, before, peak, watching)
        records = [done.record for done in course.load.done]
        result.add_requests(self.folder, records)
        found = measurements.figures(records, seconds, its.slo, around)
        if its.json:
            found |= await course.of_texts(its.json)
        failed = Counter(record.reason or "unknown" for record in records if record.outcome != "ok")
        run = Run(
            number=number,
            variant=step.variant,
            workload=its.name,
            point=step.point.label,
            started_s=started_s,
            ended_s=started_s + seconds,
            seed=self.seed + (number if its.seed == "fresh" else 0),
            asked=len(prepared),
            ok=len(records) - failed.total(),
            failed=dict(failed),
            figures=found,
            caveats=(*_caveats(course.load, prepared, its), *course.unscored),
            cut=course.cut,
        )
        if course.stopped:
            self.runs.append(run)
            raise asyncio.CancelledError
        return run


class _Course:
    """One run: its requests, then the engine's counters and the scores of answers. It may break off at each step, and
    what was measured until then is kept. cut: first reason why it broke off. stopped: by hand."""

    def __init__(
        self,
        subject: Subject,
        target: BenchTarget,
        step: RunStep,
        prepared: Sequence[Prepared],
        on_done: Callable[[Done], None],
    ) -> None:
        self.cut: str | None = None
        self.stopped = False
        self.unscored: list[str] = []
        self.load = LoadRun(target, variant=step.variant, keep_text=step.workload.json is not None, on_done=self._done)
        self._subject = subject
        self._step = step
        self._prepared = prepared
        self._on_done = on_done
        self._unreached = 0
        self._dead = False
        self._sending: asyncio.Task[None]

    def _done(self, done: Done) -> None:
        self._unreached = self._unreached + 1 if done.record.reason in UNREACHED else 0
        if self._unreached == DEAD_AFTER and not self._sending.done():
            self._dead = True
            self._sending.cancel()
        self._on_done(done)

    @property
    def _answered(self) -> int:
        return sum(done.record.outcome == "ok" for done in self.load.done)

    def _stop(self, why: str) -> None:
        self.stopped, self.cut = True, self.cut or why

    async def send(self) -> None:
        """Send all requests, until they have ended, or it is stopped by hand, or the engine is dead."""
        self._sending = asyncio.create_task(self.load.send(self._prepared, self._step.point.concurrency))
        try:
            await asyncio.wait((self._sending,))
        except asyncio.CancelledError:
            self.stopped = True
            self._sending.cancel()
            await asyncio.wait((self._sending,))

    def set_cut(self) -> None:
        """Set `cut` if sending broke off. Raises the error if sending itself failed."""
        if self.stopped:
            self.cut = f"it was stopped by hand after {len(self.load.done)} of {len(self._prepared)} requests"
        elif self._dead:
            self.cut = (
                f"{self._subject.target.url} stopped answering after {self._answered} of {len(self._prepared)} requests"
            )
        elif error := self._sending.exception():
            raise error

    async def around(
        self, session: aiohttp.ClientSession, before: Exposition, peak: Peak, watching: asyncio.Task[None]
    ) -> Around | None:
        """Return the engine's counters around the run; None where it does not report them, or restarted."""
        subject = self._subject
        try:
            await asyncio.gather(watching, return_exceptions=True)
            after = await scrape_settled(session, subject, before, self._answered)
            if not has_restarted(before, after):
                return Around(before, after, subject.series, peak.kv_ratio, peak.driver_bytes, subject.startup)
            self.cut = self.cut or f"{subject.target.url} was restarted meanwhile"
        except BadTarget as error:
            self.cut = self.cut or str(error)
        except asyncio.CancelledError:
            self._stop("it was stopped by hand before the engine's counters were read")
        return None

    async def of_texts(self, wanted: workload.Json) -> dict[str, float]:
        """Return the share of answers that are no JSON, and the mean score."""
        texts = [done.text for done in self.load.done if done.record.outcome == "ok"]
        if not texts:
            return {}
        found = {"invalid_json_ratio": sum(not _is_json(text) for text in texts) / len(texts)}
        if wanted.score and not self.stopped:
            try:
                found["score.mean"] = statistics.fmean([await _score(wanted.score, text or "") for text in texts])
            except (OSError, ValueError) as error:
                self.unscored.append(f"no score: {error}")
            except asyncio.CancelledError:
                self._stop("it was stopped by hand before its answers were scored")
        return found


def _caveats(load: LoadRun, prepared: Sequence[Prepared], its: Workload) -> Iterator[str]:
    """Yield the caveats of a run."""
    wanted = {asked.request_id: asked for asked in prepared}
    good = [done.record for done in load.done if done.record.outcome == "ok"]
    other = [
        r.prompt_tokens
        for r in good
        if r.prompt_tokens is not None and r.prompt_tokens != wanted[r.request_id].ask.prompt_tokens
    ]
    if other:
        yield f"{len(other)} of {len(good)} prompts had another length than requested, by the engine's count"
    if unknown := sum(record.completion_tokens is None for record in good):
        yield f"{unknown} of {len(good)} answers came without the engine's count of tokens"
    short = sum(
        r.completion_tokens is not None and r.completion_tokens < wanted[r.request_id].ask.output_tokens for r in good
    )
    if short and its.ignore_eos:
        yield f"{short} of {len(good)} answers were shorter than requested"
    together, several = measurements.without_tpot(good)
    if 2 * together > several:
        yield f"TPOT is omitted: {together} of {several} answers came in one read, so no time between tokens is known"
    if load.late_s > 0.05:
        yield f"requests were sent up to {load.late_s:.2f} s late: this machine could not keep the pace"
    for reason, words in sorted(load.said.items()):
        if words:
            yield f"{'no connection' if reason in UNREACHED else 'the engine said'} ({reason}): {words}"
    if its.replay and its.replay.left_out:
        yield (
            f"{its.replay.left_out} lines of the log could not be sent again: they do not say when they began, or how"
            f" long they were{its.replay.left_out_why}"
        )
    if its.seed == "fixed":
        yield "every run sent the same prompts, so later runs find them in the prefix cache"


def _why(reason: str, said: Mapping[str, str]) -> str:
    return f"{reason}: {said[reason]}" if said.get(reason) else reason


def _is_json(text: str | None) -> bool:
    try:
        json.loads(text or "")
    except ValueError:
        return False
    return True


async def _score(command: Sequence[str], text: str) -> float:
    """Return the score that a command prints for an answer. Raises OSError where it does not start, ValueError where it
    prints no number."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        output, complaint = await process.communicate(text.encode())
    finally:
        if process.returncode is None:
            process.kill()
    try:
        return float(output)
    except ValueError:
        last = complaint.decode(errors="replace").strip().splitlines()[-1:]
        raise ValueError(f"{shlex.join(command)} printed no number{f': {last[0]}' if last else ''}") from None


def _hardware() -> str:
    """Describe this machine; the engine's own may be another."""
    names = {line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")}
    return (
        f"{', '.join(sorted(names)) or platform.machine()}, {os.cpu_count()} cores, {platform.system()} (where the"
        " bench ran)"
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


async def probe(subject: Subject, its: Workload, seed: int) -> tuple[float, float] | None:
    """Return seconds to the first token and for each further one of a single short request; None where it failed.
    Raises NoTokenizer."""
    asks = workload_plan.plan(its, workload.points(its)[0], seed, WARM_UP - 1)[:1]
    few = [
        workload_plan.PlannedRequest(
            number=0, kind=None, segments=ask.segments, output_tokens=min(ask.output_tokens, 16)
        )
        for ask in asks
    ]
    async with http_session() as session:
        writer = await Writer.of(
            Remote(session, subject.target.url, subject.target.model, subject.target.key),
            subject.target.model,
            "probe",
            seed,
        )
        load = LoadRun(BenchTarget(subject.target.url, subject.target.model, subject.target.key, its.timeout_s))
        await load.send(await writer.prepare(few, 0, "completions", {"ignore_eos": True}), 1)
    record = load.done[0].record
    return None if record.ttft_ms is None else (record.ttft_ms / 1000, (record.tpot_ms or 0.0) / 1000)
