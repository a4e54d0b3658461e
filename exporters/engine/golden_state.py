"""Result of a golden check, and the file in which `vllm-watch golden check` keeps the last one of each engine.

The sidecar reads that file; a check on demand updates it as one on a schedule does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from exporters.catalogue import golden
from exporters.exposition import Sample
from exporters.text import write_atomically


class GoldenVerdict(StrEnum):
    """Verdict of a golden check."""

    SAME = "same"
    DIFFERENT = "different"  # other numbers than recorded, for a known reason that is no fault by itself
    WRONG = "wrong"


class GoldenCause(StrEnum):
    """Cause of a verdict; a bounded label."""

    NONE = "none"  # equal to the last bit
    NOISE = "noise"  # within what undamaged runs differ by
    RELEASE = "release"  # another release of the engine
    TOKENIZER = "tokenizer"  # the same text becomes other tokens
    TEMPLATE = "template"  # the chat route renders other tokens
    NOT_FINITE = "not_finite"  # log-probabilities are NaN or infinite
    REPETITION = "repetition"  # greedy completions repeat one token
    DTYPE = "dtype"  # other floats than recorded
    MODEL = "model"  # another model under the same name
    NUMERIC = "numeric"  # beyond noise, and none of the above
    DECODE = "decode"  # the prompt is as recorded, the completion is not


class GoldenResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check. sentence: the verdict in words. at_s: its end, in unix seconds. seconds: its duration.

    tokens: prompt and completion tokens that it used. mean_abs, p99, max_abs: differences of log-probabilities in nats;
    z2, max_z: the same against noise; all None where nothing was compared. first: first token that differs."""

    address: str
    model: str
    verdict: GoldenVerdict
    cause: GoldenCause
    sentence: str
    at_s: float
    seconds: float = 0.0
    tokens: int = 0
    requests: int = 0
    mean_abs: float | None = None
    p99: float | None = None
    max_abs: float | None = None
    z2: float | None = None
    max_z: float | None = None
    first: str | None = None
    version: str | None = None


class GoldenState(msgspec.Struct, frozen=True, kw_only=True):
    """Last result of one engine. tokens_total: of all its checks. interval_s: of scheduled ones, None on demand."""

    result: GoldenResult
    tokens_total: int
    interval_s: float | None = None


class _StateFile(msgspec.Struct, frozen=True):
    golden: tuple[GoldenState, ...] = ()


def read_states(path: Path) -> tuple[GoldenState, ...]:
    """Return the states of a result file. Raises OSError, and ValueError for another content."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_StateFile).golden
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ValueError(f"{path} is no result file of `vllm-watch golden check`") from None


def keep_result(path: Path, result: GoldenResult, interval_s: float | None) -> None:
    """Put a result into the file, in place of the former one of that engine and model. One process at a time.

    interval_s: None for a check on demand, which leaves the interval of scheduled ones as it is. Raises OSError, and
    ValueError for a file that is something else."""
    try:
        states = read_states(path)
    except FileNotFoundError:
        states = ()
    key = (result.address, result.model)
    former = next((one for one in states if (one.result.address, one.result.model) == key), None)
    others = tuple(one for one in states if one is not former)
    total = result.tokens + (former.tokens_total if former else 0)
    if interval_s is None and former is not None:
        interval_s = former.interval_s
    state = GoldenState(result=result, tokens_total=total, interval_s=interval_s)
    write_atomically(path, msgspec.json.encode(_StateFile((*others, state))) + b"\n")


def samples(states: Iterable[GoldenState]) -> Iterator[Sample]:
    """Yield the series of the states."""
    for state in states:
        result = state.result
        labels = {"address": result.address, "model_name": result.model}
        yield golden.GOLDEN_VERDICT, {**labels, "verdict": str(result.verdict), "cause": str(result.cause)}, 1
        yield golden.GOLDEN_CHECKED, labels, result.at_s
        yield golden.GOLDEN_TOKENS, labels, state.tokens_total
        if result.max_abs is not None:
            yield golden.GOLDEN_DIFFERENCE, labels, result.max_abs
        if state.interval_s is not None:
            yield golden.GOLDEN_INTERVAL, labels, state.interval_s
