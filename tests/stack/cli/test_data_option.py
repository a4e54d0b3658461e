"""`--data`: commands give the same answer from a data set as from the log that was shipped to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from exporters.requests.record import to_line
from stack.cli import main
from stack.root import ROOT
from tests.support.request_dataset import made_requests, make_dataset

# A time as a float has a quarter of a microsecond, which each record of a log is off; a data set has microseconds.
FLOAT_HOURS = 1e-8
RECORDS = made_requests(300, step_s=60.0)  # over several hours, with one price for all


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("both")
    (folder / "requests.jsonl").write_bytes(b"".join(map(to_line, RECORDS)))
    make_dataset(folder / "data", RECORDS)
    return str(folder / "requests.jsonl"), str(folder / "data")


def printed(*words: str) -> str:
    found = CliRunner().invoke(main, list(words))
    assert 0 == found.exit_code, found.output
    return found.stdout


def known(row: dict[str, object]) -> dict[str, float]:
    """Return the numbers of a row that are known."""
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


@pytest.mark.parametrize("period", [(), ("--from", "2025-11-24", "--to", "2025-11-25")])
def test_cost(places: tuple[str, str], period: tuple[str, ...]):
    log, data = places
    one = json.loads(printed("cost", "--log", log, "--gpus", "2", *period, "--json"))
    other = json.loads(printed("cost", "--data", data, "--gpus", "2", *period, "--json"))
    assert known(one["total"]) == pytest.approx(known(other["total"]), rel=1e-9, abs=FLOAT_HOURS)
    rows = [sorted(each["rows"], key=lambda row: (row["team"], row["model"])) for each in (one, other)]
    assert len(rows[0]) > 3
    for mine, theirs in zip(*rows, strict=True):
        assert known(mine) == pytest.approx(known(theirs), rel=1e-9, abs=FLOAT_HOURS)
        assert mine.keys() == theirs.keys()
    tables = [
        printed("cost", *words, *period).replace(log, "").replace(data, "")
        for words in (("--log", log), ("--data", data))
    ]
    assert tables[0] == tables[1], "equal to the last digit that is printed"


def test_backfill(places: tuple[str, str], tmp_path: Path):
    log, data = places
    for words in ((log,), ("--data", data)):
        printed("sidecar", "backfill", *words, "--out", str(tmp_path / f"{len(words)}.om"))
    one, other = ((tmp_path / f"{number}.om").read_text().splitlines() for number in (1, 2))
    assert len(one) > 100
    assert sorted(one) == sorted(other)


def test_compare_variants(places: tuple[str, str]):
    log, data = places
    one, other = (
        json.loads(printed("compare", option, place, "--variant", "a", "b", "--json"))["judgements"]
        for option, place in zip(("--log", "--data"), (log, data), strict=True)
    )
    assert [(each["workload"], each["point"], len(each["findings"])) for each in one] == [
        (each["workload"], each["point"], len(each["findings"])) for each in other
    ]


def test_capacity(places: tuple[str, str]):
    log, data = places
    model = str(ROOT / "tests/golden/configs/Llama-3.1-8B-Instruct.json")
    words = ("capacity", "--model", model, "--gpu", "H200", "--max-model-len", "8K", "--json")
    words += ("--served-model-name", "large")
    one, other = (
        json.loads(printed(*words, option, place))["plans"][0]
        for option, place in zip(("--log", "--data"), (log, data), strict=True)
    )
    assert one["traffic"]["prompt_tokens"]["p95"] > 0
    for plan in (one, other):
        plan["traffic"].pop("source", None)
        plan["traffic"].pop("notes", None)
    assert one == other


def test_a_damaged_segment_stops_totals(tmp_path: Path):
    segments = make_dataset(tmp_path, RECORDS)
    (tmp_path / segments[0].key).write_bytes(b"PAR1 damaged")
    found = CliRunner().invoke(main, ["cost", "--data", str(tmp_path), "--gpus", "1"])
    assert 2 == found.exit_code
    assert segments[0].key in found.stderr


@pytest.mark.parametrize(
    "words", [("cost", "--data", "x", "--log", "y"), ("sidecar", "backfill", "--out", "z"), ("compare", "--data", "x")]
)
def test_one_source(words: tuple[str, ...], tmp_path: Path):
    assert 2 == CliRunner().invoke(main, list(words)).exit_code
