"""Reader of workload files and the logs that they replay, with the checks that types cannot do."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from exporters.requests.public_trace import TracedRequest, read_requests
from exporters.requests.read import ReadReport
from exporters.requests.record import RequestRecord, ended_at
from stack.bench.workload import (
    METRICS,
    MOST_REQUESTS,
    Logged,
    Replay,
    RequestClass,
    Workload,
    WorkloadFile,
    points,
    requests_of,
    shapes,
)
from stack.bench.workload_fit import longest_requests
from stack.bench.workload_lengths import Length, length_ends
from stack.config import BadConfig, YamlFile, meant, read, source

_A_LENGTH = "a number of tokens, or {p50, p95}, {min, max} or {choices}"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")


def included() -> dict[str, Path]:
    """Return the paths of the included workloads, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "workloads").glob("*.yaml"))}


def load(what: str | Path) -> WorkloadFile:
    """Load a file of workloads, or an included one by name, with the logs that it replays. Raises BadConfig for the
    first mistake."""
    path = Path(what)
    if not path.exists() or path.is_dir():
        if str(what) not in (ours := included()):
            raise BadConfig(f"{what} is neither a file nor an included workload{meant(str(what), ours)}")
        path = ours[str(what)]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        suite = understood(read(path))  # which says why it cannot be read
    else:
        suite = understood(source(indented(text), str(path)))
    return msgspec.structs.replace(suite, workloads=tuple(_with_log(workload, path) for workload in suite.workloads))


def indented(text: str) -> str:
    """Return the text with unindented lines after `- name:`, as in Lab 10's file when copied from its web page,
    indented below the name."""
    lines, below = [], False
    for line in text.splitlines():
        if re.match(r"workloads:|metrics:|- ", line):
            below = line.startswith("- name:")
        lines.append(f"  {line}" if below and re.match(r"\w+:", line) else line)
    return "\n".join(lines) + "\n"


def understood(written: YamlFile) -> WorkloadFile:
    """Parse and check a file of workloads; logs are not read. Raises BadConfig for the first mistake."""
    if not written.data:
        raise BadConfig(f"{written.place}: the file is empty; it should hold `workloads:` and a list of them")
    try:
        suite = written.into(WorkloadFile)
        for sentence in mistakes(suite):
            raise BadConfig(written.locate(sentence))
    except BadConfig as error:
        raise BadConfig(
            _named(str(error), written.data).replace("Expected `int | object | null`", f"expected {_A_LENGTH}")
        ) from None
    return suite


def _named(message: str, data: Any) -> str:
    """Return the message with the name of a workload in place of its index."""

    def name(found: re.Match[str]) -> str:
        try:
            given = data["workloads"][int(found[1])]["name"]
        except (IndexError, KeyError, TypeError):
            return found[0]
        return f"workloads.{given}" if isinstance(given, str) else found[0]

    return re.sub(r"workloads\[(\d+)\]", name, message)


def _with_log(workload: Workload, path: Path) -> Workload:
    if workload.replay is None or workload.replay.log is None:
        return workload
    log, place = path.parent / workload.replay.log, f"{path}: workloads.{workload.name}.replay.log"
    if workload.replay.requests:
        raise BadConfig(f"{place}: the replay has requests of its own, too; keep one of them")
    report = ReadReport()
    try:
        records = list(read_requests([log], report))
    except OSError as error:
        raise BadConfig(f"{place}: {log} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadConfig(f"{place}: {error}") from error
    requests = logged(records)
    if not requests:
        raise BadConfig(
            f"{place}: no line of {log} has all of ts, e2e_ms, prompt_tokens and completion_tokens, so nothing of it"
            " can be sent again"
        )
    left_out = len(records) + report.total + report.repeats - len(requests)
    why = "".join(f"; {note}" for note in report.notes).replace(f"{log}:", "line ")
    replay = msgspec.structs.replace(workload.replay, requests=requests, left_out=left_out, left_out_why=why)
    for sentence in _replay_mistakes(f"{path}: workloads.{workload.name}", workload, replay):
        raise BadConfig(sentence)
    return msgspec.structs.replace(workload, replay=replay)


def logged(records: Iterable[RequestRecord]) -> tuple[Logged, ...]:
    """Return the requests of a log that can be replayed, in the order of their start; a team becomes a class."""
    found = []
    for record in records:
        ended_s, took_ms, prompt, answer = (
            ended_at(record),
            record.e2e_ms,
            record.prompt_tokens,
            record.completion_tokens,
        )
        if ended_s is not None and took_ms is not None and prompt and answer:
            blocks = record.hash_ids if isinstance(record, TracedRequest) else None
            found.append(Logged(ended_s - took_ms / 1000, prompt, answer, record.team, blocks or ()))
    found.sort(key=lambda request: request.offset_s)
    return tuple(
        msgspec.structs.replace(request, offset_s=round(request.offset_s - found[0].offset_s, 3)) for request in found
    )


# how to say it, and whether a number is right; infinity and what is no number never are
_Range = tuple[str, Callable[[float], bool]]
_TOKENS: _Range = ("1 to 100,000,000", lambda n: 1 <= n <= 10**8)
_TURNS: _Range = ("1 to 1,000", lambda n: 1 <= n <= 1000)  # each holds the whole history
_POSITIVE: _Range = ("more than 0", lambda n: 0 < n < math.inf)
_COUNT: _Range = ("0 or more", lambda n: 0 <= n < math.inf)
_NUMBERS: Mapping[str, _Range] = {
    **dict.fromkeys(("input_tokens", "output_tokens", "turn_tokens", "p50", "p95", "min", "max", "choices",
        "max_input_tokens", "max_output_tokens",
                     "prefix_groups", "block_tokens"), _TOKENS),
    **dict.fromkeys(("requests", "concurrency", "rate", "burstiness", "size", "every_s", "speed", "share", "timeout_s",
        "runs", "ttft_ms", "tpot_ms",
                     "e2e_ms"), _POSITIVE),
    **dict.fromkeys(("shared_prefix_tokens", "temperature", "warm_up", "offset_s", "left_out"), _COUNT),
    "turns": _TURNS,
    "expected_hit": ("between 0 and 1", lambda n: 0 <= n <= 1),
}  # fmt: skip
_MAY_BE_EMPTY = ("choices", "classes", "requests", "score", "hash_ids")
_POINTS = {"concurrency": "closed", "rate": "poisson", "burst": "burst", "replay": "replay"}


def mistakes(suite: WorkloadFile) -> Iterator[str]:
    """Yield the mistakes in a file that types do not exclude: sentences that begin with a dotted path."""
    if not suite.workloads:
        yield "workloads: there is none; add one with name, input_tokens, output_tokens and concurrency"
    for index, metric in enumerate(suite.metrics):
        if metric not in METRICS:
            near = meant(metric, METRICS) or "; there are " + ", ".join(METRICS)
            yield f"metrics[{index}]: {metric!r} is no metric{near}"
    names: set[str] = set()
    for index, workload in enumerate(suite.workloads):
        place = f"workloads[{index}]"
        if workload.name in names:
            yield f"{place}.name: {workload.name} stands there twice; give each workload its own"
        names.add(workload.name)
        yield from _name_mistakes(place, workload)
        yield from _number_mistakes(place, workload)
        yield from _load_mistakes(place, workload)
        yield from _shape_mistakes(place, workload)
        yield from _json_mistakes(place, workload)


def _name_mistakes(place: str, workload: Workload) -> Iterator[str]:
    for where, name in (
        (f"{place}.name", workload.name),
        *((f"{place}.classes.{name}", name) for name in workload.classes),
    ):
        if not _NAME.fullmatch(name):
            yield (
                f"{where}: {name[:60]!r} is no name; use 1 to 60 of letters, digits, . _ - and begin with a letter or"
                " digit"
            )


def _number_mistakes(place: str, value: Any) -> Iterator[str]:
    """Yield the mistakes in every number of a struct, by the name of its field."""
    for name, inner in msgspec.structs.asdict(value).items():
        where = f"{place}.{name}"
        if inner == () and name not in _MAY_BE_EMPTY:
            yield f"{where}: the list is empty; leave it out, or name at least one"
        if isinstance(inner, Length):
            yield from _length_mistakes(where, inner)
        parts = (
            inner.items()
            if isinstance(inner, dict)
            else enumerate(inner)
            if isinstance(inner, tuple)
            else [(None, inner)]
        )
        for key, part in parts:
            here = where if key is None else f"{where}[{key}]" if isinstance(key, int) else f"{where}.{key}"
            if isinstance(part, msgspec.Struct):
                yield from _number_mistakes(here, part)
            elif name in _NUMBERS and isinstance(part, int | float) and not _NUMBERS[name][1](part):
                yield f"{here}: {part:g} should be {_NUMBERS[name][0]}"


def _length_mistakes(place: str, length: Length) -> Iterator[str]:
    given = {name for name, value in msgspec.structs.asdict(length).items() if value not in (None, ())}
    if given not in ({"choices"}, {"min", "max"}) and not {"p50", "p95"} <= given - {"choices"} == given:
        yield (
            f"{place}: {', '.join(sorted(given)) or 'nothing'} is no distribution; give p50 and p95, or min and max, or"
            " all four, or choices"
        )
    rising = [(name, value) for name in ("min", "p50", "p95", "max") if (value := getattr(length, name)) is not None]
    for (less, low), (more, high) in itertools.pairwise(rising):
        if low > high:
            yield f"{place}.{less}: {low} is more than {more} ({high})"


def _load_mistakes(place: str, workload: Workload) -> Iterator[str]:
    given = [key for key in _POINTS if getattr(workload, key) is not None]
    if not given:
        yield f"{place}: it says no load; give concurrency, rate, burst or replay"
    for key in given:
        if workload.arrival is not None and _POINTS[key] != workload.arrival:
            yield (
                f"{place}.{key}: goes with arrival: {_POINTS[key]}, not with {workload.arrival}; leave arrival out to"
                " have several kinds of load"
            )
    if workload.burstiness != 1 and workload.rate is None:
        yield f"{place}.burstiness: is of arrivals at a rate, and there is no rate"
    yield from _point_mistakes(place, workload)
    if workload.replay is not None:
        yield from _replay_mistakes(place, workload, workload.replay)


def _point_mistakes(place: str, workload: Workload) -> Iterator[str]:
    for point in (several := points(workload)):
        if several.count(point) > 1:
            yield f"{place}: the load {point.label} stands there twice"
            break
        if (many := requests_of(workload, point)) > MOST_REQUESTS:
            yield (
                f"{place}: the load {point.label} leads to {many:,} requests in a run; {MOST_REQUESTS:,} is the most,"
                " so say fewer with requests"
            )


def _replay_mistakes(place: str, workload: Workload, replay: Replay) -> Iterator[str]:
    for key in ("input_tokens", "output_tokens", "classes", "turn_tokens", "concurrency", "rate", "burst", "json"):
        if getattr(workload, key):
            yield f"{place}.{key}: a replay has the lengths and times of its log; leave {key} out"
    if replay.log is None and not replay.requests:
        yield f"{place}.replay: give the path of a log, or requests, and not both"
    if any(request.hash_ids for request in replay.requests):
        for key, usual in (("endpoint", "completions"), ("shared_prefix_tokens", 0)):
            if getattr(workload, key) != usual:
                yield f"{place}.{key}: hash_ids name the tokens that prompts share; leave {key} out"


def _shape_mistakes(place: str, workload: Workload) -> Iterator[str]:
    yield from _turn_mistakes(place, workload)
    if workload.expected_hit and workload.expected_hit[0] > workload.expected_hit[1]:
        yield f"{place}.expected_hit: the lower end comes first, as in [0.3, 0.6]"
    for kind, shape in shapes(workload).items():
        yield from _class_mistakes(place if kind is None else f"{place}.classes.{kind}", workload, shape)
    if workload.cache == "warm" and not any(shape.shared_prefix_tokens for shape in shapes(workload).values()):
        yield f"{place}.cache: nothing can be warm, since no tokens are shared; give shared_prefix_tokens"
    most = workload.max_input_tokens
    if most and workload.turns > 1 and (grown := max(prompt for _, prompt, _ in longest_requests(workload))) > most:
        yield (
            f"{place}.max_input_tokens: {workload.turns} turns lead to prompts of {grown} tokens, more than {most};"
            " take fewer turns"
        )


def _turn_mistakes(place: str, workload: Workload) -> Iterator[str]:
    if workload.turns > 1 and workload.turn_tokens is None:
        yield f"{place}.turn_tokens is missing; say how many tokens each of the {workload.turns} turns adds"
    if workload.turns == 1 and workload.turn_tokens is not None:
        yield f"{place}.turn_tokens: there is one turn; say how many there are with turns"
    if workload.requests is not None and workload.requests % workload.turns:
        more = math.ceil(workload.requests / workload.turns) * workload.turns
        yield f"{place}.requests: {workload.requests} is no multiple of turns ({workload.turns}); {more} would be"


def _class_mistakes(place: str, workload: Workload, shape: RequestClass) -> Iterator[str]:
    for key in ("input_tokens", "output_tokens"):
        if workload.replay is None and getattr(shape, key) is None:
            yield f"{place}.{key} is missing"
    if shape.prefix_groups and shape.prefix_groups > 1 and not shape.shared_prefix_tokens:
        yield f"{place}.prefix_groups: there is nothing that a group could share; give shared_prefix_tokens"
    shortest = (
        None
        if shape.input_tokens is None
        else min(length_ends(shape.input_tokens)[0], workload.max_input_tokens or math.inf)
    )
    if shortest is not None and (prefix := shape.shared_prefix_tokens or 0) >= shortest:
        yield (
            f"{place}.shared_prefix_tokens: {prefix} leaves nothing of the shortest prompt ({shortest}), which contains"
            " it; raise input_tokens"
        )


def _json_mistakes(place: str, workload: Workload) -> Iterator[str]:
    if workload.json is None:
        return
    if workload.endpoint != "chat":
        yield f"{place}.endpoint: json needs chat, since the instruction is a chat message"
    if workload.ignore_eos:
        yield f"{place}.ignore_eos: json needs false, since an answer that goes on after its end is no JSON"
