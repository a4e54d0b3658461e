"""Workloads that fit an engine's context, with their lengths scaled on request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from stack.bench.workload import TEMPLATE_TOKENS, LoadLevel, Workload, requests_of, shapes
from stack.bench.workload_lengths import Length, cut_length, length_ends
from stack.config import BadConfig


def fitting(workload: Workload, context_tokens: int, scale: float | None = None) -> Workload:
    """Return the workload with every length multiplied by the scale, if any. Raises BadConfig when a request could be
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
    longest = max(longest_requests(workload), key=lambda need: need[1] + need[2])
    return longest if longest[1] + longest[2] > free else None


def _way_out(workload: Workload, context_tokens: int) -> str:
    _, prompt, answer = max(longest_requests(workload), key=lambda need: need[1] + need[2])
    scale = context_tokens / (prompt + answer)
    for _ in range(40):
        shown = float(f"{scale:.2g}")
        if not _too_long(scaled(workload, shown), context_tokens):
            return f"; --scale {shown:g} would make it fit"
        scale *= 0.95
    return "; no scale would make it fit, so give the engine a larger --max-model-len"


def longest_requests(workload: Workload) -> Iterator[tuple[str | None, int, int]]:
    """Yield the longest last prompt and the longest answer of each class."""
    if workload.replay is not None:
        for request in workload.replay.requests[: requests_of(workload, LoadLevel("replay"))]:
            yield (
                request.kind,
                cut_length(request.input_tokens, workload.max_input_tokens),
                cut_length(request.output_tokens, workload.max_output_tokens),
            )
        return
    for kind, shape in shapes(workload).items():
        answer = cut_length(length_ends(shape.output_tokens or 1)[1], workload.max_output_tokens)
        first = max(
            cut_length(length_ends(shape.input_tokens or 1)[1], workload.max_input_tokens),
            (shape.shared_prefix_tokens or 0) + 1,
        )
        yield kind, first + (workload.turns - 1) * (answer + length_ends(workload.turn_tokens or 0)[1]), answer


def scaled(workload: Workload, scale: float) -> Workload:
    """Multiply every length, rounded down, 1 at least."""
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
            with_lengths(replay, ("block_tokens",)),
            requests=tuple(with_lengths(one, ("input_tokens", "output_tokens")) for one in replay.requests),
        )
    classes = {kind: with_lengths(given, of_shape) for kind, given in workload.classes.items()}
    whole: Workload = with_lengths(workload, (*of_shape, "turn_tokens", "max_input_tokens", "max_output_tokens"))
    return msgspec.structs.replace(whole, classes=classes, replay=replay)
