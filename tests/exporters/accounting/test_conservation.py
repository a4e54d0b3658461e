"""Segments, sidecar and engines of a recorded day agree to the token in a real Prometheus, or differ by causes that
are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from exporters import exposition
from exporters.catalogue import reconciled, sidecar, vllm
from exporters.exposition import Sample
from exporters.requests.bounded_names import BoundedNames
from exporters.requests.counters import RequestCounters
from exporters.requests.record import RequestRecord, timestamp, to_line
from stack.cli.ship import ship

DAY, MIDNIGHT_S = "2026-11-24", 1_795_478_400.0
NOON_S, END_S = MIDNIGHT_S + 43_200, MIDNIGHT_S + 86_400

pytestmark = pytest.mark.prometheus


def record(number: int, ended_s: float | None, **fields: object) -> RequestRecord:
    given = {
        "request_id": f"{number:032x}",
        "ts": None if ended_s is None else timestamp(ended_s),
        "team": f"team-{number % 2}",
        "model": "chat",
        "outcome": "ok",
        "finish_reason": "stop",
        "prompt_tokens": 100 + number,
        "cached_tokens": 16,
        "completion_tokens": 7,
    }
    return RequestRecord(**(given | fields))  # type: ignore[arg-type]


class Recorded:
    """A day in a Prometheus: what the sidecar counted at some times, and the log that was shipped."""

    def __init__(self, folder: Path, past: Callable[[Path], str]) -> None:
        self.folder, self._past = folder, past
        self._counters = RequestCounters(BoundedNames((), 50), BoundedNames((), 50))
        self._samples: dict[str, list[str]] = {}
        self._more: list[Sample] = []
        self.log: list[RequestRecord] = []

    def counted(self, at_s: float, records: list[RequestRecord], more: list[Sample] = ()) -> None:  # type: ignore[assignment]
        """Count records, and scrape the sidecar at that time."""
        self._counters.add_all(records)
        for line in exposition.render([*self._counters.samples(), *more]).splitlines():
            if not line.startswith("#") and "_bucket" not in line:
                series, value = line.rsplit(" ", 1)
                name, brace, labels = series.partition("{")
                series = f'{name}{{instance="sidecar:9401",job="sidecar"{"," + labels if brace else "}"}'
                self._samples.setdefault(name, []).append(f"{series} {value} {at_s:.3f}")

    def scraped(self, at_s: float, prompt: int, computed: int, role: str = "") -> None:
        """Scrape an engine at that time: sums of prompt tokens and of computed ones of finished requests."""
        labels = 'instance="vllm:8001",job="vllm",model_name="chat"' + (f',role="{role}"' if role else "")
        for name, value in ((PROMPT_SUM, prompt), (COMPUTED_SUM, computed)):
            self._samples.setdefault(name, []).append(f"{name}{{{labels}}} {value} {at_s:.3f}")

    def verify(self) -> tuple[Result, list[dict[str, Any]]]:
        """Ship the log, and compare the day."""
        wanted = {metric.name for metric in (sidecar.REQUESTS, sidecar.TOKENS, *ENGINE_SERIES)}
        wanted |= {PROMPT_SUM, COMPUTED_SUM}
        page = "".join(
            f"# TYPE {name} unknown\n" + "".join(f"{line}\n" for line in sorted(lines, key=_series_and_time))
            for name, lines in sorted(self._samples.items())
            if name in wanted
        )
        (self.folder / "day.om").write_text(page + "# EOF\n")
        (self.folder / "requests.jsonl").write_bytes(b"".join(map(to_line, self.log)))
        file = self.folder / "ship.yaml"
        settings = {"dataset": "dataset", "cluster": "prod", "writer": "gw-0", "state": "state"}
        file.write_text(yaml.safe_dump(settings | {"requests_log": ["requests.jsonl"]}))
        done = CliRunner().invoke(ship, ["run", "--config", str(file), "--once"])
        assert 0 == done.exit_code, done.output
        command = ["verify", "--config", str(file), "--day", DAY, "--prometheus", self._past(self.folder / "day.om")]
        balances = CliRunner().invoke(ship, [*command, "--json"])
        return CliRunner().invoke(ship, command), json.loads(balances.output)[
            "balances"
        ] if balances.exit_code < 2 else []


def _series_and_time(line: str) -> tuple[str, float]:
    series, _, at = line.rsplit(" ", 2)
    return series, float(at)


ENGINE_SERIES = (
    reconciled.LOGGED,
    reconciled.ENGINE,
    reconciled.MISSING_IN_LOG,
    reconciled.EXTRA_IN_LOG,
    reconciled.OPEN,
)
PROMPT_SUM, COMPUTED_SUM = (
    f"{metric.name}_sum" for metric in (vllm.REQUEST_PROMPT_TOKENS, vllm.REQUEST_PREFILL_KV_COMPUTED_TOKENS)
)


def cached_of(logged: int, engine: int, missing: int = 0) -> list[Sample]:
    """Return the sidecar's comparison of prompt tokens."""
    labels = {"kind": "prompt", "model_name": "chat"}
    return [
        (reconciled.LOGGED, labels, logged),
        (reconciled.ENGINE, labels, engine),
        (reconciled.MISSING_IN_LOG, {"cause": "unknown", **labels}, missing),
        (reconciled.OPEN, labels, 0),
    ]


def engines(logged: int, engine: int, missing: int = 0) -> list[Sample]:
    labels = {"kind": "requests", "model_name": "chat"}
    return [
        (reconciled.LOGGED, labels, logged),
        (reconciled.ENGINE, labels, engine),
        (reconciled.MISSING_IN_LOG, {"cause": "no_usage", **labels}, missing),
        (reconciled.OPEN, labels, 0),
    ]


@pytest.fixture
def recorded(tmp_path: Path, past: Callable[[Path], str]) -> Recorded:
    return Recorded(tmp_path, past)


def test_a_day_agrees_to_the_token(recorded: Recorded) -> None:
    before = [record(number, MIDNIGHT_S - 7200) for number in range(3)]
    of_day = [record(number, NOON_S + number) for number in range(10, 40)]
    recorded.counted(MIDNIGHT_S - 60, before, engines(3, 3))
    recorded.counted(NOON_S + 600, of_day, engines(33, 34, 1))
    recorded.counted(END_S - 60, [], engines(33, 34, 1))
    recorded.log = before + of_day
    done, balances = recorded.verify()
    assert 0 == done.exit_code, done.output
    assert f"{DAY}: OK" in done.output
    found = {str(one["kind"]): one for one in balances}
    sums = {kind: (one["segments"], one["sidecar"]) for kind, one in found.items()}
    assert {
        "requests": (30, 30),
        "prompt": (sum(range(110, 140)), sum(range(110, 140))),
        "cached": (480, 480),
        "completion": (210, 210),
    } == sums
    assert (30, 31, 1) == tuple(found["requests"][name] for name in ("logged", "engine", "engine_explained"))
    assert {"missing in log: no_usage": 1} == found["requests"]["causes"]


@pytest.mark.parametrize(
    ("engine_cached", "missing", "unexplained"),
    [(480, 0, 0), (481, 0, 1), (479, 0, 1), (560, 100, 0), (581, 100, 1), (479, 100, 1)],
)
def test_cached_tokens_of_the_engines_are_compared(
    recorded: Recorded, engine_cached: int, missing: int, unexplained: int
) -> None:
    """To the token; of requests in no log they are no more than the prompt tokens."""
    of_day = [record(number, NOON_S + number) for number in range(10, 40)]
    prompt = sum(range(110, 140))
    recorded.counted(MIDNIGHT_S - 60, [record(0, MIDNIGHT_S - 7200)], cached_of(100, 100))
    recorded.scraped(MIDNIGHT_S - 50, 100, 84)
    both = cached_of(100 + prompt, 100 + prompt + missing, missing)
    recorded.counted(NOON_S + 600, of_day, both)
    recorded.scraped(NOON_S + 610, 100 + prompt + missing, 84 + prompt + missing - engine_cached)
    recorded.counted(END_S - 60, [], both)
    recorded.scraped(END_S - 50, 100 + prompt + missing, 84 + prompt + missing - engine_cached)
    recorded.log = of_day
    done, balances = recorded.verify()
    cached = next(one for one in balances if one["kind"] == "cached")
    assert (480, 480, engine_cached, unexplained) == tuple(
        cached[name] for name in ("segments", "logged", "engine", "unexplained")
    )
    assert (1 if unexplained else 0) == done.exit_code, done.output
    assert ([missing] if missing else []) == list(cached["causes"].values())
    assert bool(missing) == (": 100\n" in done.output)


def test_cached_tokens_of_a_pair_are_not_compared(recorded: Recorded) -> None:
    of_day = [record(number, NOON_S + number) for number in range(10, 40)]
    recorded.counted(MIDNIGHT_S - 60, [record(0, MIDNIGHT_S - 7200)], cached_of(100, 100))
    recorded.counted(NOON_S + 600, of_day, cached_of(3835, 3835))
    for role in ("prefill", "decode"):
        recorded.scraped(MIDNIGHT_S - 50, 100, 84, role)
        recorded.scraped(NOON_S + 610, 3835, 84, role)
    recorded.log = of_day
    _, balances = recorded.verify()
    cached = next(one for one in balances if one["kind"] == "cached")
    assert (480, None, 0) == tuple(cached[name] for name in ("sidecar", "engine", "unexplained"))


def test_requests_around_midnight_are_a_known_cause(recorded: Recorded) -> None:
    """Counted in the day after, or from the day before; as many as can have been, and no more."""
    early, late = [record(1, MIDNIGHT_S - 20), record(2, MIDNIGHT_S - 15)], record(3, END_S - 20)
    of_day = [record(number, NOON_S) for number in range(10, 20)]
    recorded.counted(MIDNIGHT_S - 60, [record(0, MIDNIGHT_S - 7200)])
    recorded.counted(NOON_S + 600, [*early, *of_day])
    recorded.counted(END_S - 60, [])
    recorded.counted(END_S + 300, [late])
    recorded.log = [*early, *of_day, late]
    done, balances = recorded.verify()
    assert 0 == done.exit_code, done.output
    requests = next(one for one in balances if one["kind"] == "requests")
    assert [1, 2] == [amount for cause, amount in requests["causes"].items() if "midnight" in cause]
    assert 2 == len(requests["causes"])


@pytest.mark.parametrize("lost", [1, -1], ids=["missing in the segments", "missing in the counters"])
def test_a_difference_without_a_cause_is_reported(recorded: Recorded, lost: int) -> None:
    of_day = [record(number, NOON_S) for number in range(10, 20)]
    recorded.counted(MIDNIGHT_S - 60, [record(0, MIDNIGHT_S - 7200)])
    recorded.counted(NOON_S + 600, of_day if lost > 0 else of_day[1:])
    recorded.counted(END_S - 60, [])
    recorded.log = of_day[1:] if lost > 0 else of_day
    done, balances = recorded.verify()
    assert 1 == done.exit_code, done.output
    assert f"{DAY}: 4 differences" in done.output
    assert {"requests": 1, "prompt": 110, "cached": 16, "completion": 7} == {
        one["kind"]: one["unexplained"] for one in balances
    }


def test_records_without_a_time_are_a_known_cause(recorded: Recorded) -> None:
    of_day, untimed = [record(number, NOON_S) for number in range(10, 20)], record(1, None)
    recorded.counted(MIDNIGHT_S - 60, [record(0, MIDNIGHT_S - 7200)])
    recorded.counted(NOON_S + 600, [*of_day, untimed])
    recorded.counted(END_S - 60, [])
    recorded.log = [*of_day, untimed]
    done, balances = recorded.verify()
    assert 0 == done.exit_code, done.output
    assert 1 == next(one for one in balances if one["kind"] == "requests")["causes"]["without a time"]


def test_a_day_that_nobody_counted_is_an_error(recorded: Recorded) -> None:
    recorded.counted(MIDNIGHT_S - 3 * 86_400, [record(0, MIDNIGHT_S - 3 * 86_400)])
    recorded.log = [record(1, NOON_S)]
    done, _ = recorded.verify()
    assert 2 == done.exit_code
    assert "has no vllm_watch_requests_total of 2026-11-24" in done.output
