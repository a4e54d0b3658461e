"""Plan of a run: every request with its lengths, its time and what it shares with others.

Invariant: a plan follows from the workload, the load and the seed alone. Two plans of one seed have the same lengths
and times whatever their run numbers are, so that two variants can be given the same work; only the tokens differ.

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

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from stack.bench.workload import LoadLevel, Replay, RequestClass, Workload, requests_of, shapes
from stack.bench.workload_lengths import Lengths, cut_length, length_at


class Segment(msgspec.Struct, frozen=True):
    """Piece of a prompt. key: the same key in the same run gives the same tokens."""

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


def plan(workload: Workload, point: LoadLevel, seed: int, run: int) -> tuple[PlannedRequest, ...]:
    """Return every request of a run, in the order of their numbers. Runs of one seed differ in their keys alone."""
    rng = random.Random(f"{seed} {workload.name} {point.label}")  # noqa: S311 (nothing secret)
    keys = _Keys(workload, point, run)
    if workload.replay is not None:
        return tuple(_again(workload, keys))
    return tuple(_talks(workload, point, keys, rng))


class _Keys:
    """Names of segments."""

    def __init__(self, workload: Workload, point: LoadLevel, run: int) -> None:
        self._run = f"run:{run}" if workload.seed == "fresh" or run < 0 else f"run:{workload.name}:{point.label}"
        self._shared = f"bench:{workload.name}" if workload.cache == "warm" else self._run

    def own(self, number: int, what: str) -> str:
        return f"{self._run}:{number}:{what}"

    def first(self, number: int, tokens: int, prefix: int, group: str) -> tuple[Segment, ...]:
        """Return the first prompt of a conversation: the prefix of its group, then its own part of at least 1 token."""
        own = Segment(self.own(number, "prompt"), max(1, tokens - prefix))
        return (Segment(f"{self._shared}:prefix:{group}", prefix), own) if prefix else (own,)

    def blocks(self, number: int, tokens: int, hash_ids: Sequence[int], block_tokens: int) -> Iterator[Segment]:
        """Yield a prompt of blocks that the requests of a run share; what is beyond the last one is its own."""
        for hash_id in hash_ids:
            if tokens > 0:
                yield Segment(f"{self._run}:block:{hash_id}", min(block_tokens, tokens))
            tokens -= block_tokens
        if tokens > 0:
            yield Segment(self.own(number, "prompt"), tokens)


def _again(workload: Workload, keys: _Keys) -> Iterator[PlannedRequest]:
    """Yield the requests of a log; a prompt that has no room for the shared prefix has none of it."""
    replay = workload.replay or Replay()
    for number, request in enumerate(replay.requests[: requests_of(workload, LoadLevel("replay"))]):
        tokens, prefix = cut_length(request.input_tokens, workload.max_input_tokens), workload.shared_prefix_tokens
        yield PlannedRequest(
            number=number,
            kind=request.kind,
            segments=tuple(keys.blocks(number, tokens, request.hash_ids, replay.block_tokens))
            if request.hash_ids
            else keys.first(number, tokens, prefix if prefix < tokens else 0, f"{number % workload.prefix_groups}"),
            output_tokens=cut_length(request.output_tokens, workload.max_output_tokens),
            due_s=request.offset_s / replay.speed,
            temperature=workload.temperature,
        )


def _talks(workload: Workload, point: LoadLevel, keys: _Keys, rng: random.Random) -> Iterator[PlannedRequest]:
    """Yield conversations of one turn or more. In a closed loop of several turns the next begins when one ends, so that
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
    """Lengths of one class of requests, for `count` conversations."""

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
    """Draw one length from each of `count` equal parts of the distribution, shuffled: runs of one workload have nearly
    the same work."""
    drawn = [cut_length(length_at(lengths, (part + rng.random()) / count), most) for part in range(count)]
    rng.shuffle(drawn)
    return drawn


def _kinds(workload: Workload, count: int, rng: random.Random) -> list[str | None]:
    """Return the class of each conversation, in proportion to the shares, shuffled."""
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
    """Return the start of each conversation; None in a closed loop. At a rate, the last begins at its expected time, as
    in `vllm bench serve`."""
    if workload.burst is not None and point.burst is not None:
        return [talk // point.burst * workload.burst.every_s for talk in range(count)]
    if point.rate_per_s is None:
        return None
    gaps = [rng.gammavariate(workload.burstiness, 1.0) for _ in range(count)]
    stretch = count * workload.turns / point.rate_per_s / sum(gaps)
    return [at * stretch for at in itertools.accumulate(gaps)]
