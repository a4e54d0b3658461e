"""What a bench asks of an engine: workloads in YAML, and from them every request of a run, with its lengths, its time
and what it shares with others.

Law: a plan follows from the workload, the load and the seed alone. Two plans of one seed have the same lengths and
times whatever their run numbers are, so that two arms can be given the same work; only the tokens differ.

A segment says which tokens are the same, not what they are: one key, the same tokens. Keys that begin with `run:`
belong to one run: no other has their tokens, so nothing of them was in a cache before. Keys that begin with `bench:`
(cache: warm) are the same in all runs. With `seed: fixed` all
runs of a load have the same keys: each then meets what the one before left in the cache, which the report must say.
Runs before the first, such as a warm-up, have negative numbers and keys of their own. What a key ends with says whose
words its tokens are: `:prompt` a user's, `:answer` the model's.

In a conversation each prompt is the whole history. The answers in it are made up, as long as those that were asked for:
a plan is ready before the first answer comes, so an engine cannot find an answer of its own in its cache, only what it
was sent."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, Literal

import msgspec

from exporters.requests.read import BadLines, read_records
from exporters.requests.record import RequestRecord, ended_at
from stack.config import BadConfig, YamlFile, meant, read, source

METRICS = (
    "ttft_ms", "tpot_ms", "e2e_ms", "qps", "tokens_per_second", "total_tokens_per_second", "goodput_qps", "error_ratio",
    "queue_ms", "hit_ratio",
    "preemptions", "prompt_tokens", "completion_tokens", "kv_peak_ratio", "memory_peak_gb", "driver_memory_gb",
    "invalid_json_ratio", "score",
)  # fmt: skip
LEAST_REQUESTS = 20  # of a run that does not say how many
MOST_REQUESTS = 1_000_000
TEMPLATE_TOKENS = 64  # kept free for what a chat template adds
_A_LENGTH = "a number of tokens, or {p50, p95}, {min, max} or {choices}"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_NORMAL = NormalDist()
_P95 = _NORMAL.inv_cdf(0.95)


# ---- what a plan is made of


class Segment(msgspec.Struct, frozen=True):
    """A piece of a prompt. key: the same key in the same run is the same tokens."""

    key: str
    tokens: int


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. kind: its class. due_s: when to send it, from the start of the run; None: when a place is free.

    after: number of the request that must have ended before."""

    number: int
    kind: str | None
    segments: tuple[Segment, ...]
    output_tokens: int
    due_s: float | None = None
    after: int | None = None
    temperature: float | None = None
    json_schema: Mapping[str, Any] | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)


class LoadLevel(msgspec.Struct, frozen=True):
    """One load: so many at once, so many a second, or so many in a burst; none of them for a replay."""

    label: str
    concurrency: int | None = None
    rate_per_s: float | None = None
    burst: int | None = None


# ---- what a file may say


class Length(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A distribution of tokens. p50 and p95: lognormal; min and max cut it, or are the ends of a uniform one. choices:
    each as often as the others.

    A lognormal has p95 half-way (in logarithms) between p50 and its longest, and its shortest as far below; 0.05 %
    would lie beyond each."""

    p50: int | None = None
    p95: int | None = None
    min: int | None = None
    max: int | None = None
    choices: tuple[int, ...] = ()


Lengths = int | Length
Several = int | tuple[int, ...]


class RequestClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One class of requests among others, reported apart. share: of all requests, as a weight. What it leaves out is as
    in the workload."""

    share: float
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    shared_prefix_tokens: int | None = None
    prefix_groups: int | None = None


class Burst(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """So many requests at once, every so many seconds."""

    size: Several
    every_s: float = 10.0


class Logged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a log: when it began, from the first on, and its lengths."""

    offset_s: float
    input_tokens: int
    output_tokens: int
    kind: str | None = None


class Replay(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request log sent again. log: its file, from where the workload stands; its requests are put in when it is
    loaded, or stand in the file themselves. speed: 2 is twice as fast. left_out: lines of the log that do not say when
    they began or how long they were."""

    log: str | None = None
    speed: float = 1.0
    requests: tuple[Logged, ...] = ()
    left_out: int = 0


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an answer must keep to be a good one."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


class Json(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Answers that must be JSON. structured: the engine is held to the schema; off, it is only told. instruction: what
    it is told.

    score: a command that reads an answer on its standard input and prints a number."""

    schema: dict[str, Any]
    structured: bool = True
    instruction: str = "Answer with one JSON object that fits this JSON schema, and with nothing else."
    score: tuple[str, ...] = ()


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is asked, how often and at which load. concurrency, rate, burst and replay each give points of load; a
    workload may have several.

    input_tokens: the whole prompt, of which shared_prefix_tokens are the same in all requests of a group. requests: of
    a run; left out: see `requests_of`. rate: requests/s, with gaps of a gamma distribution of shape `burstiness` (1:
    Poisson, less: burstier). arrival: only says again which of them it is. turns: of a conversation, each of which adds
    turn_tokens and the answer before. max_*: what is drawn longer is cut to it.
    ignore_eos: answers have the length that was asked for; without it, that or less. seed: fresh for each run, or one
    for all. cache: cold: nothing that is sent was seen before the run; warm: shared prefixes were; as_is: as cold, but
    the engine's cache is not emptied. expected_hit: what hit ratio `scenario` leads to."""

    name: str
    about: str = ""
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    shared_prefix_tokens: int = 0
    prefix_groups: int = 1
    classes: dict[str, RequestClass] = {}
    turns: int = 1
    turn_tokens: Lengths | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    requests: int | None = None
    arrival: Literal["closed", "poisson", "burst", "replay"] | None = None
    concurrency: Several | None = None
    rate: float | tuple[float, ...] | None = None
    burstiness: float = 1.0
    burst: Burst | None = None
    replay: Replay | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    json: Json | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    timeout_s: float = 300.0
    warm_up: int = 4
    runs: int = 6
    order: Literal["interleaved", "sequential"] = "interleaved"
    seed: Literal["fresh", "fixed"] = "fresh"
    cache: Literal["cold", "warm", "as_is"] = "cold"
    slo: Slo = Slo()
    expected_hit: tuple[float, float] | None = None
    scenario: str = ""


class WorkloadFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of workloads. metrics: what is printed of the results; none named: all."""

    workloads: tuple[Workload, ...]
    metrics: tuple[str, ...] = ()


# ---- reading


def shipped() -> dict[str, Path]:
    """The workloads that come with us."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "workloads").glob("*.yaml"))}


def load(what: str | Path) -> WorkloadFile:
    """A file of workloads, or a shipped one by its name, with the logs that it replays. Raises BadConfig for the first
    mistake."""
    path = Path(what)
    if not path.exists() or path.is_dir():
        if str(what) not in (ours := shipped()):
            raise BadConfig(f"{what} is neither a file nor a shipped workload{meant(str(what), ours)}")
        path = ours[str(what)]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        suite = understood(read(path))  # which says why it cannot be read
    else:
        suite = understood(source(indented(text), str(path)))
    return msgspec.structs.replace(suite, workloads=tuple(_with_log(workload, path) for workload in suite.workloads))


def indented(text: str) -> str:
    """The text; what stands at the margin behind `- name:`, as in Lab 10's file when it is copied from its page, is put
    below the name again."""
    lines, below = [], False
    for line in text.splitlines():
        if re.match(r"workloads:|metrics:|- ", line):
            below = line.startswith("- name:")
        lines.append(f"  {line}" if below and re.match(r"\w+:", line) else line)
    return "\n".join(lines) + "\n"


def understood(written: YamlFile) -> WorkloadFile:
    """A file of workloads, checked; logs are not read. Raises BadConfig for the first mistake."""
    if not written.data:
        raise BadConfig(f"{written.place}: the file is empty; it should hold `workloads:` and a list of them")
    try:
        suite = written.into(WorkloadFile)
        for sentence in mistakes(suite):
            raise BadConfig(written.told(sentence))
    except BadConfig as error:
        raise BadConfig(
            _named(str(error), written.data).replace("Expected `int | object | null`", f"expected {_A_LENGTH}")
        ) from None
    return suite


def _named(message: str, data: Any) -> str:
    """The message with the name of a workload in place of its index."""

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
    bad = BadLines()
    try:
        records = list(read_records([log], bad))
    except OSError as error:
        raise BadConfig(f"{place}: {log} cannot be read: {error.strerror}") from error
    requests = logged(records)
    if not requests:
        raise BadConfig(
            f"{place}: no line of {log} has all of ts, e2e_ms, prompt_tokens and completion_tokens, so nothing of it"
            " can be sent again"
        )
    left_out = len(records) + bad.total - len(requests)
    return msgspec.structs.replace(
        workload, replay=msgspec.structs.replace(workload.replay, requests=requests, left_out=left_out)
    )


def logged(records: Iterable[RequestRecord]) -> tuple[Logged, ...]:
    """What can be sent again of a log, in the order in which it began; a team becomes a class."""
    found = []
    for record in records:
        ended_s, took_ms, prompt, answer = (
            ended_at(record),
            record.e2e_ms,
            record.prompt_tokens,
            record.completion_tokens,
        )
        if ended_s is not None and took_ms is not None and prompt and answer:
            found.append(Logged(ended_s - took_ms / 1000, prompt, answer, record.team))
    found.sort(key=lambda request: request.offset_s)
    return tuple(
        msgspec.structs.replace(request, offset_s=round(request.offset_s - found[0].offset_s, 3)) for request in found
    )


# ---- mistakes


# how to say it, and whether a number is right; infinity and what is no number never are
_Range = tuple[str, Callable[[float], bool]]
_TOKENS: _Range = ("1 to 100,000,000", lambda n: 1 <= n <= 10**8)
_TURNS: _Range = ("1 to 1,000", lambda n: 1 <= n <= 1000)  # each holds the whole history
_POSITIVE: _Range = ("more than 0", lambda n: 0 < n < math.inf)
_COUNT: _Range = ("0 or more", lambda n: 0 <= n < math.inf)
_NUMBERS: Mapping[str, _Range] = {
    **dict.fromkeys(("input_tokens", "output_tokens", "turn_tokens", "p50", "p95", "min", "max", "choices",
        "max_input_tokens", "max_output_tokens",
                     "prefix_groups"), _TOKENS),
    **dict.fromkeys(("requests", "concurrency", "rate", "burstiness", "size", "every_s", "speed", "share", "timeout_s",
        "runs", "ttft_ms", "tpot_ms",
                     "e2e_ms"), _POSITIVE),
    **dict.fromkeys(("shared_prefix_tokens", "temperature", "warm_up", "offset_s", "left_out"), _COUNT),
    "turns": _TURNS,
    "expected_hit": ("between 0 and 1", lambda n: 0 <= n <= 1),
}  # fmt: skip
_MAY_BE_EMPTY = ("choices", "classes", "requests", "score")
_POINTS = {"concurrency": "closed", "rate": "poisson", "burst": "burst", "replay": "replay"}


def mistakes(suite: WorkloadFile) -> Iterator[str]:
    """What is wrong with a file that its types cannot tell: sentences, each of which begins with a dotted place."""
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
    """Of every number in a struct, by the name of its field."""
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
    if (replay.log is None) == (not replay.requests):
        yield f"{place}.replay: give the path of a log, or requests, and not both"


def _shape_mistakes(place: str, workload: Workload) -> Iterator[str]:
    yield from _turn_mistakes(place, workload)
    if workload.expected_hit and workload.expected_hit[0] > workload.expected_hit[1]:
        yield f"{place}.expected_hit: the lower end comes first, as in [0.3, 0.6]"
    for kind, shape in shapes(workload).items():
        yield from _class_mistakes(place if kind is None else f"{place}.classes.{kind}", workload, shape)
    if workload.cache == "warm" and not any(shape.shared_prefix_tokens for shape in shapes(workload).values()):
        yield f"{place}.cache: nothing can be warm, since no tokens are shared; give shared_prefix_tokens"
    most = workload.max_input_tokens
    if most and workload.turns > 1 and (grown := max(prompt for _, prompt, _ in _longest(workload))) > most:
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
        None if shape.input_tokens is None else min(_ends(shape.input_tokens)[0], workload.max_input_tokens or math.inf)
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
        yield f"{place}.endpoint: json needs chat, since a model must be told what to answer"
    if workload.ignore_eos:
        yield f"{place}.ignore_eos: json needs false, since an answer that goes on after its end is no JSON"


# ---- what follows from a workload


def shapes(workload: Workload) -> dict[str | None, RequestClass]:
    """The classes of a workload, whole; one without a name where there are none."""
    own = {
        name: getattr(workload, name)
        for name in ("input_tokens", "output_tokens", "shared_prefix_tokens", "prefix_groups")
    }
    if not workload.classes:
        return {None: RequestClass(share=1.0, **own)}
    missing = {
        kind: {name: value for name, value in own.items() if getattr(given, name) is None}
        for kind, given in workload.classes.items()
    }
    return {kind: msgspec.structs.replace(given, **missing[kind]) for kind, given in workload.classes.items()}


def points(workload: Workload) -> tuple[LoadLevel, ...]:
    """The loads of a workload, in the order of the file."""
    return (
        *(LoadLevel(f"c{n}", concurrency=int(n)) for n in _each(workload.concurrency)),
        *(LoadLevel(f"r{rate:g}", rate_per_s=rate) for rate in _each(workload.rate)),
        *(LoadLevel(f"b{n}", burst=int(n)) for n in _each(workload.burst.size if workload.burst else None)),
        *((LoadLevel("replay"),) if workload.replay else ()),
    )


def requests_of(workload: Workload, point: LoadLevel) -> int:
    """How many requests a run has. Where the file does not say: four for each that is under way at once, those of 20 s,
    three bursts; 20 at least."""
    if workload.replay is not None:
        return min(workload.requests or len(workload.replay.requests), len(workload.replay.requests))
    if workload.requests is not None:
        return workload.requests
    enough = max(
        LEAST_REQUESTS, 4 * (point.concurrency or 0), math.ceil(20 * (point.rate_per_s or 0)), 3 * (point.burst or 0)
    )
    return math.ceil(enough / workload.turns) * workload.turns


def resolved(workload: Workload) -> dict[str, Any]:
    """Everything that a workload says or leaves to us, for bench.json; of a replayed log, how many requests and their
    hash."""
    said: dict[str, Any] = msgspec.to_builtins(workload)
    if workload.replay is not None:
        said["replay"] |= {"requests": len(workload.replay.requests), "hash": _hash(said["replay"]["requests"])}
    return {name: value for name, value in said.items() if value not in (None, "", {}, [])}


def hash_of(workloads: Iterable[Workload]) -> str:
    """Twelve digits that are the same for workloads that ask the same; words about them, and how many runs there are,
    do not count."""
    words = ("about", "scenario", "expected_hit", "runs", "order")
    return _hash(
        [{name: value for name, value in resolved(workload).items() if name not in words} for workload in workloads]
    )


def _hash(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:12]


def expected_seconds(workload: Workload, point: LoadLevel, ttft_s: float, tpot_s: float) -> float:
    """About how long a run takes, given how long a first and each further token take at that load."""
    n = requests_of(workload, point)
    if workload.replay is not None:
        sent = workload.replay.requests[:n]
        return sent[-1].offset_s / workload.replay.speed + ttft_s + sent[-1].output_tokens * tpot_s
    weights = [(shape.share, _mean(shape.output_tokens or 1)) for shape in shapes(workload).values()]
    answer_s = ttft_s + tpot_s * sum(share * tokens for share, tokens in weights) / sum(share for share, _ in weights)
    if point.concurrency is not None:
        return math.ceil(n / min(point.concurrency, n)) * answer_s
    arriving_s = (
        n / point.rate_per_s
        if point.rate_per_s
        else (math.ceil(n / (point.burst or n)) - 1) * (workload.burst.every_s if workload.burst else 0)
    )
    return arriving_s + workload.turns * answer_s


# ---- the engine's context


def fitting(workload: Workload, context_tokens: int, scale: float | None = None) -> Workload:
    """The workload, with every length multiplied by the scale if one is given. Raises BadConfig when a request could be
    longer than the context."""
    if scale is not None and not 0 < scale < math.inf:
        raise BadConfig(f"--scale: {scale:g} should be more than 0")
    wanted = workload if scale is None else scaled(workload, scale)
    if (wrong := _too_long(wanted, context_tokens)) is None:
        return wanted
    kind, prompt, answer = wrong
    of = f", class {kind}" if kind else ""
    free = f" and {TEMPLATE_TOKENS} for the chat template" if workload.endpoint == "chat" else ""
    raise BadConfig(
        f"workload {workload.name}{of}: {prompt:,} tokens of prompt and {answer:,} of answer{free} are more than the"
        f" engine's context of {context_tokens:,}{_way_out(workload, context_tokens)}"
    )


def _too_long(workload: Workload, context_tokens: int) -> tuple[str | None, int, int] | None:
    free = context_tokens - (TEMPLATE_TOKENS if workload.endpoint == "chat" else 0)
    longest = max(_longest(workload), key=lambda need: need[1] + need[2])
    return longest if longest[1] + longest[2] > free else None


def _way_out(workload: Workload, context_tokens: int) -> str:
    _, prompt, answer = max(_longest(workload), key=lambda need: need[1] + need[2])
    scale = context_tokens / (prompt + answer)
    for _ in range(40):
        shown = float(f"{scale:.2g}")
        if not _too_long(scaled(workload, shown), context_tokens):
            return f"; --scale {shown:g} would make it fit"
        scale *= 0.95
    return "; no scale would make it fit, so give the engine a larger --max-model-len"


def _longest(workload: Workload) -> Iterator[tuple[str | None, int, int]]:
    """For each class, the longest last prompt and the longest answer."""
    if workload.replay is not None:
        for request in workload.replay.requests[: requests_of(workload, LoadLevel("replay"))]:
            yield (
                request.kind,
                _cut(request.input_tokens, workload.max_input_tokens),
                _cut(request.output_tokens, workload.max_output_tokens),
            )
        return
    for kind, shape in shapes(workload).items():
        answer = _cut(_ends(shape.output_tokens or 1)[1], workload.max_output_tokens)
        first = max(
            _cut(_ends(shape.input_tokens or 1)[1], workload.max_input_tokens), (shape.shared_prefix_tokens or 0) + 1
        )
        yield kind, first + (workload.turns - 1) * (answer + _ends(workload.turn_tokens or 0)[1]), answer


def scaled(workload: Workload, scale: float) -> Workload:
    """Every length multiplied, down to a whole token, 1 at least."""
    of_shape = ("input_tokens", "output_tokens", "shared_prefix_tokens")

    def times(value: Any) -> Any:
        if isinstance(value, Length):
            return msgspec.structs.replace(
                value, **{name: times(part) for name, part in msgspec.structs.asdict(value).items()}
            )
        if isinstance(value, tuple):
            return tuple(times(part) for part in value)
        return max(1, int(value * scale)) if value else value

    def with_lengths(struct: Any, names: Sequence[str]) -> Any:
        return msgspec.structs.replace(struct, **{name: times(getattr(struct, name)) for name in names})

    replay = workload.replay
    if replay is not None:
        replay = msgspec.structs.replace(
            replay, requests=tuple(with_lengths(one, ("input_tokens", "output_tokens")) for one in replay.requests)
        )
    classes = {kind: with_lengths(given, of_shape) for kind, given in workload.classes.items()}
    whole: Workload = with_lengths(workload, (*of_shape, "turn_tokens", "max_input_tokens", "max_output_tokens"))
    return msgspec.structs.replace(whole, classes=classes, replay=replay)


# ---- the plan


def plan(workload: Workload, point: LoadLevel, seed: int, run: int) -> tuple[PlannedRequest, ...]:
    """Every request of a run, in the order of their numbers. Runs of one seed differ in their keys alone."""
    rng = random.Random(f"{seed} {workload.name} {point.label}")  # noqa: S311 (nothing secret)
    keys = _Keys(workload, point, run)
    if workload.replay is not None:
        return tuple(_again(workload, keys))
    return tuple(_talks(workload, point, keys, rng))


class _Keys:
    """How segments are called."""

    def __init__(self, workload: Workload, point: LoadLevel, run: int) -> None:
        self._run = f"run:{run}" if workload.seed == "fresh" or run < 0 else f"run:{workload.name}:{point.label}"
        self._shared = f"bench:{workload.name}" if workload.cache == "warm" else self._run

    def own(self, number: int, what: str) -> str:
        return f"{self._run}:{number}:{what}"

    def first(self, number: int, tokens: int, prefix: int, group: str) -> tuple[Segment, ...]:
        """The prompt that begins a conversation: what its group shares, then what is its own, 1 token at least."""
        own = Segment(self.own(number, "prompt"), max(1, tokens - prefix))
        return (Segment(f"{self._shared}:prefix:{group}", prefix), own) if prefix else (own,)


def _again(workload: Workload, keys: _Keys) -> Iterator[PlannedRequest]:
    """The requests of a log; a prompt that has no room for the shared prefix has none of it."""
    replay = workload.replay or Replay()
    for number, request in enumerate(replay.requests[: requests_of(workload, LoadLevel("replay"))]):
        tokens, prefix = _cut(request.input_tokens, workload.max_input_tokens), workload.shared_prefix_tokens
        yield PlannedRequest(
            number=number,
            kind=request.kind,
            segments=keys.first(number, tokens, prefix if prefix < tokens else 0, f"{number % workload.prefix_groups}"),
            output_tokens=_cut(request.output_tokens, workload.max_output_tokens),
            due_s=request.offset_s / replay.speed,
            temperature=workload.temperature,
        )


def _talks(workload: Workload, point: LoadLevel, keys: _Keys, rng: random.Random) -> Iterator[PlannedRequest]:
    """Conversations of one turn or more. In a closed loop of several turns the next begins when one ends, so that
    `concurrency` go on at a time."""
    turns = workload.turns
    count = requests_of(workload, point) // turns
    kinds = _kinds(workload, count, rng)
    drawn = {kind: _Drawn(workload, kind, shape, kinds.count(kind), rng) for kind, shape in shapes(workload).items()}
    due_s = _due(workload, point, count, rng)
    schema = workload.json.schema if workload.json and workload.json.structured else None
    for talk, kind in enumerate(kinds):
        source, start = drawn[kind], talk * turns
        segments: tuple[Segment, ...] = keys.first(start, next(source.inputs), source.prefix, next(source.groups))
        answer = 0
        for number in range(start, start + turns):
            if number > start:
                segments += (
                    Segment(keys.own(number - 1, "answer"), answer),
                    Segment(keys.own(number, "prompt"), next(source.added)),
                )
            after = (
                number - 1
                if number > start
                else start - 1 - turns * (point.concurrency - 1)
                if turns > 1 and point.concurrency
                else None
            )
            answer = next(source.outputs)
            yield PlannedRequest(
                number=number,
                kind=kind,
                segments=segments,
                output_tokens=answer,
                due_s=due_s[talk] if due_s and number == start else None,
                after=None if after is None or after < 0 else after,
                temperature=workload.temperature,
                json_schema=schema,
            )


class _Drawn:
    """The lengths of one class of requests, for so many conversations."""

    def __init__(
        self, workload: Workload, kind: str | None, shape: RequestClass, count: int, rng: random.Random
    ) -> None:
        turns, groups = workload.turns, shape.prefix_groups or 1
        given = workload.classes.get(kind) if kind else None
        # what a class does not give itself it shares with the others
        of = f"{kind}:" if given and given.shared_prefix_tokens is not None else ""
        self.prefix = shape.shared_prefix_tokens or 0
        self.inputs = iter(_draw(shape.input_tokens or 1, count, rng, workload.max_input_tokens))
        self.outputs = iter(_draw(shape.output_tokens or 1, count * turns, rng, workload.max_output_tokens))
        self.added = iter(_draw(workload.turn_tokens or 1, count * (turns - 1), rng))
        self.groups = iter(rng.sample([f"{of}{number % groups}" for number in range(count)], count))


def _draw(lengths: Lengths, count: int, rng: random.Random, most: int | None = None) -> list[int]:
    """One length from each of `count` equal parts of the distribution, shuffled: runs of one workload have nearly the
    same work."""
    drawn = [_cut(_at(lengths, (part + rng.random()) / count), most) for part in range(count)]
    rng.shuffle(drawn)
    return drawn


def _kinds(workload: Workload, count: int, rng: random.Random) -> list[str | None]:
    """The class of each conversation: as many of each as its share says, shuffled."""
    classes = shapes(workload)
    whole = sum(shape.share for shape in classes.values())
    kinds: list[str | None] = []
    up_to = 0.0
    for kind, shape in classes.items():
        up_to += shape.share
        kinds += [kind] * (round(count * up_to / whole) - len(kinds))
    rng.shuffle(kinds)
    return kinds


def _due(workload: Workload, point: LoadLevel, count: int, rng: random.Random) -> list[float] | None:
    """When each conversation begins; None in a closed loop. At a rate, the last begins when it should on average, as
    `vllm bench serve` has it."""
    if workload.burst is not None and point.burst is not None:
        return [talk // point.burst * workload.burst.every_s for talk in range(count)]
    if point.rate_per_s is None:
        return None
    gaps = [rng.gammavariate(workload.burstiness, 1.0) for _ in range(count)]
    stretch = count * workload.turns / point.rate_per_s / sum(gaps)
    return [at * stretch for at in itertools.accumulate(gaps)]


# ---- lengths


def _at(lengths: Lengths, u: float) -> int:
    """The length below which the share u of a distribution lies, 0 <= u < 1."""
    if isinstance(lengths, int):
        return lengths
    if lengths.choices:
        return sorted(lengths.choices)[int(u * len(lengths.choices))]
    low, high = _ends(lengths)
    if lengths.p50 is None or lengths.p95 is None:
        return low + int(u * (high - low + 1))
    wide = (math.log(lengths.p95) - math.log(lengths.p50)) / _P95
    z = _NORMAL.inv_cdf(min(max(u, 1e-9), 1 - 1e-9))
    return min(max(round(lengths.p50 * math.exp(z * wide)), low), high)


def _ends(lengths: Lengths) -> tuple[int, int]:
    """The shortest and the longest."""
    if isinstance(lengths, int):
        return lengths, lengths
    if lengths.choices:
        return min(lengths.choices), max(lengths.choices)
    if lengths.p50 is None or lengths.p95 is None:
        return lengths.min or 1, lengths.max or lengths.min or 1
    wide = (lengths.p95 / lengths.p50) ** 2
    return lengths.min or max(1, int(lengths.p50 / wide)), lengths.max or math.ceil(lengths.p50 * wide)


def _mean(lengths: Lengths) -> float:
    return fmean(_at(lengths, (part + 0.5) / 200) for part in range(200))


def _cut(tokens: int, most: int | None) -> int:
    return tokens if most is None else min(tokens, most)


def _each(several: float | tuple[float, ...] | None) -> tuple[float, ...]:
    return () if several is None else several if isinstance(several, tuple) else (several,)
