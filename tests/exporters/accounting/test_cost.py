"""`vllm-watch cost`: what it reckons from request logs, and from what a real Prometheus recorded."""

from __future__ import annotations

import asyncio
import csv
import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.accounting import cost
from exporters.accounting.billing_period import BillingPeriod, calendar_period
from exporters.accounting.cost_from_log import from_log, parse_gpus
from exporters.accounting.cost_from_prometheus import from_prometheus
from exporters.accounting.gpu_use import ABORTED, IDLE, UNATTRIBUTED
from exporters.accounting.prices import ApiPrice, GpuPrice, PriceChange, Prices
from exporters.catalogue import attributed, gpu
from exporters.catalogue import sidecar as sidecar_series
from exporters.net.prometheus import Address, address
from exporters.requests.record import RequestRecord, timestamp, to_line
from stack.cli import cost as cli_cost
from stack.cli import main

T0 = 1_760_000_400.0
PRICES = Prices(gpu_hour=3.6, currency="EUR", api=(ApiPrice("chat", 1.0, 3.0, 0.5),))


def request(start_s: float, end_s: float, team: str | None = "red", **more: object) -> RequestRecord:
    """One that ran from and to times since T0."""
    given = {"model": "chat", "outcome": "ok", "prompt_tokens": 100, "completion_tokens": 10, **more}
    return RequestRecord(
        request_id=f"{start_s}-{end_s}-{team}-{given['model']}",
        ts=timestamp(T0 + end_s),
        e2e_ms=(end_s - start_s) * 1000,
        team=team,
        **given,
    )  # type: ignore[arg-type]


def write(folder: Path, *found: RequestRecord | str, name: str = "requests.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join(f"{one}\n".encode() if isinstance(one, str) else to_line(one) for one in found))
    return path


def last(since_s: float) -> BillingPeriod:
    """The period of so many seconds since T0."""
    return BillingPeriod(T0, T0 + since_s)


def spread_idle(found: cost.SourceTotals) -> cost.SourceTotals:
    cost.spread_cost(found, ["idle"])
    return found


def hours(result: dict) -> dict[str, float]:
    return {row["team"]: pytest.approx(row["gpu_hours"] * 3600, abs=1e-6) for row in result["rows"]}


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["cost", *map(str, words)], catch_exceptions=False)
    return done.exit_code, done.output if done.exit_code else done.stdout


# ---- from logs


def test_the_log_alone_shares_busy_time_by_who_ran(tmp_path):
    """red alone for 2 s, then both for 3; nothing says how long the GPU was there, so nothing is idle."""
    path = write(tmp_path, request(0, 5), request(2, 5, "blue"))
    result = cost.report(from_log([path]), "team")
    assert {"red": 3.5, "blue": 1.5} == hours(result)
    assert {"cost_allocation": None, "api_cost": None, "joules": None} == {
        name: result["total"][name] for name in ("cost_allocation", "api_cost", "joules")
    }
    assert any("no idle time" in note for note in result["notes"])


def test_a_time_that_is_said_has_idle(tmp_path):
    """Of 100 s on two GPUs, 5 were busy: 190 GPU-seconds stood idle, and are on the bill by allocation alone."""
    path = write(tmp_path, request(0, 5), request(0, 5, "blue"))
    report = cost.report(from_log([path], last(100), PRICES, {"": 2.0}), "team")
    assert {"red": 5.0, "blue": 5.0, IDLE: 190.0} == hours(report)
    assert pytest.approx(0.2) == report["total"]["cost_allocation"]
    assert pytest.approx(0.01) == report["total"]["cost_usage"]
    assert pytest.approx(0.2 / 220 * 1000) == report["total"]["allocation_per_1k_tokens"]
    assert pytest.approx(0.26) == report["total"]["api_cost"]


def test_a_model_without_requests_is_idle_and_named(tmp_path):
    """Of 100 s, chat was busy for 5; four GPUs of embed had no request."""
    path = write(tmp_path, request(0, 5))
    found = from_log([path], last(100), PRICES, parse_gpus(["embed=4"]))
    assert {("red", "chat"): 5.0, (IDLE, "chat"): 95.0, (IDLE, "embed"): 400.0} == {
        key: pytest.approx(use.seconds, abs=1e-6) for key, use in found.uses.items()
    }
    without_a_period = from_log([path], gpus=parse_gpus(["embed=4"]))
    assert all(any(note.startswith("--gpus names embed,") for note in each.notes) for each in (found, without_a_period))


def test_csv_has_its_notes_on_standard_error(tmp_path):
    path = write(tmp_path, request(0, 5), "no record")
    done = CliRunner().invoke(main, ["cost", "--log", str(path), "--csv"], catch_exceptions=False)
    assert "note: 1 bad line (json)" in done.stderr
    assert ["team", "red", "total"] == [line.partition(",")[0] for line in done.stdout.splitlines()]


def test_a_log_with_other_field_names_needs_the_sidecars_config(tmp_path):
    record = json.loads(to_line(request(0, 5)))
    record["tenant"] = record.pop("team")
    path = write(tmp_path, json.dumps(record))
    config = tmp_path / "sidecar.yaml"
    config.write_text("field_names: {tenant: team}\n")
    result = json.loads(run("--log", path, "--config", config, "--json")[1])
    assert ["red"] == [row["team"] for row in result["rows"]]
    assert ["__unknown__"] == [row["team"] for row in json.loads(run("--log", path, "--json")[1])["rows"]]
    status, text = run("--prometheus", "http://127.0.0.1:9", "--config", config)
    assert (2, True) == (status, re.search("--config .* --log", text) is not None)


def test_idle_cost_can_be_spread(tmp_path):
    path = write(tmp_path, request(0, 30), request(50, 60, "blue"))
    prices = Prices(gpu_hour=3.6, spread_idle=True)
    result = cost.report(spread_idle(from_log([path], last(100), prices)), "team")
    assert {"red": pytest.approx(0.075), "blue": pytest.approx(0.025), IDLE: 0.0} == {
        row["team"]: row["cost_allocation"] for row in result["rows"]
    }


def test_unreadable_answers_are_a_column(tmp_path):
    unknown = {"prompt_tokens": None, "completion_tokens": None, "est_prompt_tokens": 40, "unreadable": "usage"}
    path = write(tmp_path, request(0, 10, outcome="ok", **unknown), request(10, 20), request(0, 5, "blue"))
    report = cost.report(from_log([path], last(100), PRICES), "team")
    assert {"red": 1, "blue": 0, IDLE: 0} == {row["team"]: row["unreadable_requests"] for row in report["rows"]}
    assert (1, 40) == (report["total"]["unreadable_requests"], report["total"]["est_prompt_tokens"])
    head, rows = cli_cost.sheet(report)
    assert ["1", "0", "0", "1"] == [row[head.index("unreadable")] for row in rows]
    assert "unreadable" not in cli_cost.sheet(cost.report(from_log([write(tmp_path, request(0, 9))])))[0]


def test_aborted_work_is_a_column_of_its_team(tmp_path):
    """What was refused used nothing. Estimated tokens have columns of their own and are charged at API prices, but are
    in no exact figure."""
    unpaid = {
        "outcome": "client_abort",
        "prompt_tokens": None,
        "completion_tokens": None,
        "est_prompt_tokens": 40,
        "est_completion_tokens": 7,
    }
    path = write(
        tmp_path,
        request(0, 10, **unpaid),
        request(10, 20),
        request(0, 50, outcome="rejected"),
        request(20, 24, "blue", outcome="timeout"),
    )
    report = cost.report(from_log([path], last(100), PRICES), "team")
    assert {"red": 20.0, "blue": 4.0, IDLE: 76.0} == hours(report)
    assert {"red": 10.0, "blue": 4.0, IDLE: 0.0} == {
        row["team"]: pytest.approx(3600 * row["aborted_gpu_hours"]) for row in report["rows"]
    }
    red = next(row for row in report["rows"] if row["team"] == "red")
    assert (100, 10, 40, 7) == tuple(
        red[name] for name in ("prompt_tokens", "completion_tokens", "est_prompt_tokens", "est_completion_tokens")
    )
    assert pytest.approx((140 * 1.0 + 17 * 3.0) / 1000) == red["api_cost"]
    head, rows = cli_cost.sheet(report)
    assert "0.0039" == rows[-1][head.index("of which aborted")]
    assert "aborted_gpu_hours" in cli_cost.csv_text(report).splitlines()[0]


def test_time_in_the_gateways_queue_is_no_work(tmp_path):
    path = write(tmp_path, request(0, 10, queue_ms=8000.0))
    assert {"red": 2.0} == hours(cost.report(from_log([path]), "team"))


def test_models_have_cards_of_their_own(tmp_path):
    path = write(tmp_path, request(0, 10), request(0, 10, model="code"))
    result = cost.report(from_log([path], gpus=parse_gpus(["chat=4", "2"])), "model")
    assert {"chat": 40.0, "code": 20.0} == {
        row["model"]: pytest.approx(row["gpu_hours"] * 3600) for row in result["rows"]
    }


def test_lines_that_cannot_be_counted_are_told(tmp_path):
    path = write(tmp_path, request(0, 10), "{nonsense", "nonsense", RequestRecord(request_id="lab"))
    notes = from_log([path]).notes
    assert any(note.startswith("1 requests without ts ") for note in notes)
    assert any(note.startswith("2 bad lines (json): ") for note in notes)


def test_work_across_the_period_counts_in_part(tmp_path):
    """Work that reaches into the time counts with the part that does."""
    path = write(tmp_path, request(-50, 10), request(-90, -80), request(90, 110, "blue"))
    report = cost.report(from_log([path], last(100)), "team")
    assert {"red": 10.0, "blue": 10.0, IDLE: 80.0} == hours(report)
    assert {"red": 100.0, "blue": 0.0, IDLE: 0.0} == {row["team"]: row["prompt_tokens"] for row in report["rows"]}


spans = st.tuples(
    st.integers(0, 9000),
    st.integers(1, 4000),
    st.sampled_from(["red", "blue", None]),
    st.sampled_from(["chat", "code"]),
)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(spans, min_size=1, max_size=25), st.sets(st.sampled_from(cost.BY), min_size=1), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_the_total_is_the_sum_of_the_rows_and_all_of_the_time(tmp_path_factory, rows, by, spread, daily):
    """With any --by and --daily, a change of prices at noon of the first of two days, and two clusters."""
    ends = itertools.cycle(("ok", "client_abort", "upstream_error"))
    made = (
        request(start, start + length, team, model=model, outcome=end)
        for (start, length, team, model), end in zip(rows, ends, strict=False)
    )
    path = write(tmp_path_factory.mktemp("log"), *made)
    prices = Prices(gpu_hour=3.6, spread_idle=spread, changes=(PriceChange("2025-10-09T12:00", gpu_hour=7.2),))
    found, other = (from_log([path], last(80_000), prices, {"": 3.0}, cluster) for cluster in ("eu", "us"))
    found.parts.update(other.parts)
    result = cost.report(spread_idle(found) if spread else found, cost.parse_by(",".join(by)), daily)
    models, before_s = {model for *_, model in rows}, 1_760_011_200 - T0
    assert pytest.approx(6 * 80_000 * len(models), rel=1e-9) == result["total"]["gpu_hours"] * 3600
    cost_of_both = 6 * (before_s + 2 * (80_000 - before_s)) / 1000 * len(models)
    assert pytest.approx(cost_of_both, rel=1e-9) == result["total"]["cost_allocation"]
    keys = [(row.get("team"), row.get("model"), row["cluster"], row["period_start"]) for row in result["rows"]]
    groups = (2 if "cluster" in by else 1) * (2 + ("price" in by) if daily else 1 + ("price" in by))
    assert (len(keys), groups) == (len(set(keys)), len({key[2:] for key in keys}))
    for name in ("gpu_hours", "aborted_gpu_hours", "cost_allocation", "cost_usage", "prompt_tokens", "share"):
        assert pytest.approx(result["total"][name], rel=1e-12) == sum(row[name] for row in result["rows"])


def test_a_log_has_days_of_a_zone_and_prices_of_the_moment(tmp_path):
    """Two GPUs over the day of 25 hours, whose price doubles at noon; a request runs over midnight."""
    period = calendar_period("2026-10-25", "2026-10-27", "Europe/Berlin", 0)
    night = period.from_s + 25 * 3600 - T0
    path = write(tmp_path, request(night - 30, night + 10, outcome="client_abort"), request(night + 3600, night + 3660))
    prices = Prices(gpu_hour=2.0, timezone="Europe/Berlin", changes=(PriceChange("2026-10-25T12:00", gpu_hour=4.0),))
    result = cost.report(from_log([path], period, prices, {"": 2.0}, "eu"), "team,price", daily=True)
    days: dict[str, float] = {}
    for row in result["rows"]:
        days[row["period_start"]] = days.get(row["period_start"], 0.0) + row["cost_allocation"]
    assert {
        "2026-10-25T00:00:00+02:00": pytest.approx(13 * 2 * 2.0, rel=1e-12),
        "2026-10-25T12:00:00+01:00": pytest.approx(12 * 2 * 4.0, rel=1e-12),
        "2026-10-26T00:00:00+01:00": pytest.approx(24 * 2 * 4.0, rel=1e-12),
    } == days
    red = [row for row in result["rows"] if row["team"] == "red"]
    assert [pytest.approx(60 / 3600), pytest.approx(20 / 3600)] == [row["aborted_gpu_hours"] for row in red]
    assert [pytest.approx(60 / 3600 * 4), pytest.approx(20 / 3600 * 4)] == [row["aborted_cost"] for row in red]
    assert [0.0, 200.0] == [row["prompt_tokens"] for row in red]
    assert {"eu"} == {row["cluster"] for row in result["rows"]}


@pytest.mark.parametrize(
    ("by", "rows"),
    [
        ("team", [("red", "eu,us", "base,later", 30), ("blue", "eu,us", "base,later", 10)]),
        ("cluster", [(None, "eu", "base,later", 30), (None, "us", "later", 10)]),
        ("team, price", [("red", "eu", "base", 10), ("red", "eu,us", "later", 20), ("blue", "eu,us", "later", 10)]),
        ("price,price", [(None, "eu", "base", 10), (None, "eu,us", "later", 30)]),
        (
            cost.DEFAULT_BY,
            [("red", "eu", "base,later", 20), ("blue", "eu", "base,later", 10), ("red", "us", "later", 10)],
        ),
    ],
)
def test_a_row_sums_what_by_does_not_name(by, rows):
    found = cost.SourceTotals("log", last(100), "EUR", known={"cost"})
    for at, cluster, version, team in (
        (0, "eu", "base", "red"), (50, "eu", "later", "red"), (50, "eu", "later", "blue"), (50, "us", "later", "red"),
    ):  # fmt: skip
        found.parts[cost.CostPart(T0 + at, T0 + at + 50, cluster, version)][team, "chat"] = cost.TeamUse(10.0)
    result = cost.report(found, cost.parse_by(by))
    names = ("team", "cluster", "price_version")
    assert rows == [(*map(row.get, names), round(row["gpu_hours"] * 3600)) for row in result["rows"]]
    total = {**result["total"], result["by"].split(",")[0].replace("price", "price_version"): "total"}
    table = list(csv.DictReader(io.StringIO(cli_cost.csv_text(result))))
    assert f"{total['gpu_hours']}" == table[-1]["gpu_hours"]
    assert 1 == list(table[-1].values()).count("total")
    assert table[:-1] == list(csv.DictReader(io.StringIO(cli_cost.csv_text(result, total=False))))
    head, lines = cli_cost.sheet(result)
    assert (len(rows) + 1, "total") == (len(lines), lines[-1][0])
    assert (head, lines[:-1]) == cli_cost.sheet(result, total=False)


def test_a_day_with_two_prices_is_one_row(tmp_path):
    period = calendar_period("2026-10-15", "2026-10-17", "UTC", 0)
    path = write(tmp_path, request(period.from_s - T0, period.from_s - T0 + 9))
    prices = Prices(gpu_hour=2.0, changes=(PriceChange("2026-10-15T12:00", gpu_hour=4.0),))
    found = from_log([path], period, prices)
    result = cost.report(found, "model", daily=True)
    assert [72.0, 96.0] == [pytest.approx(row["cost_allocation"]) for row in result["rows"]]
    assert [2, 1] == [len(row["price_version"].split(",")) for row in result["rows"]]
    assert 3 == len(cost.report(found, "model,price", daily=True)["rows"])


def test_no_total_leaves_out_the_total_row(tmp_path):
    path = write(tmp_path, request(0, 5), request(2, 5, "blue"))
    assert ["team", "red", "blue"] == [
        line.partition(",")[0] for line in run("--log", path, "--csv", "--no-total")[1].splitlines()
    ]
    assert "total │" not in run("--log", path, "--no-total")[1]
    assert json.loads(run("--log", path, "--json")[1]) == json.loads(run("--log", path, "--json", "--no-total")[1])


def test_missing_prices_are_said(tmp_path):
    assert cost.NO_PRICES in from_log([write(tmp_path, request(0, 5))]).notes


def test_a_small_team_has_digits(tmp_path):
    """Three milliseconds of a GPU are not 0 in the table."""
    path = write(tmp_path, request(0, 3600), request(4000, 4000.003, "tiny"))
    head, rows = cli_cost.sheet(cost.report(from_log([path], prices=PRICES), "team"))
    tiny = next(row for row in rows if row[0] == "tiny")
    assert ("0.00000083", "0.0000030") == (tiny[head.index("GPU hours")], tiny[head.index("EUR allocated")])


# ---- the command


def test_the_table_ends_with_the_total_and_what_was_assumed(tmp_path):
    (tmp_path / "prices.yaml").write_text("gpu_hour: 3.6\ncurrency: EUR\n")
    status, text = run(
        "--log",
        write(tmp_path, request(0, 5), request(2, 5, "blue")),
        "--prices",
        tmp_path / "prices.yaml",
        "--by",
        "team",
    )
    assert 0 == status
    lines = text.splitlines()
    last = next(line for line in lines if "total" in line)
    assert lines.index(last) > max(lines.index(line) for line in lines if line.startswith("│ red"))
    assert "EUR allocated" in text
    assert f"note: {cost.SHARED}" in lines


def test_csv_and_json_say_the_same(tmp_path):
    path = write(tmp_path, request(0, 5), request(2, 5, "blue"))
    result = json.loads(run("--log", path, "--json")[1])
    table = list(csv.DictReader(io.StringIO(run("--log", path, "--csv")[1])))
    assert [*(row["team"] for row in result["rows"]), "total"] == [row["team"] for row in table]
    assert [*(row["gpu_hours"] for row in result["rows"]), result["total"]["gpu_hours"]] == [
        float(row["gpu_hours"]) for row in table
    ]
    assert {""} == {row["cost_usage"] for row in table}


def test_no_name_is_a_formula_in_a_spreadsheet(tmp_path):
    """A team may be whatever a foreign log says."""
    path = write(tmp_path, request(0, 5, "=HYPERLINK(1)"), request(2, 5, "@x"), request(3, 5, "a=b"))
    result = {row["team"] for row in csv.DictReader(io.StringIO(run("--log", path, "--csv")[1]))}
    assert {"'=HYPERLINK(1)", "'@x", "a=b"} == result - {"total"}


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ((), "--prometheus URL, --log FILE or --data LOCATION"),
        (("--log", "none.jsonl"), r"none\.jsonl: No such file"),
        (("--log", "LOG", "--gpus", "chat=many"), "--gpus 'chat=many' .* 4 or chat=4"),
        (("--log", "LOG", "--log", "LOG"), "--log .* twice"),
        (("--log", "EMPTY"), r"empty\.jsonl .*\(ts and e2e_ms\)"),
        (("--log", "LOG", "--since", "1s"), r"requests\.jsonl .*\(ts and e2e_ms\) in this period; "),
        (("--log", "LOG", "--prices", "PRICES"), r"line 2: gpus\[0\]\.gpu_hours .* gpu_hour\?"),
        (("--prometheus", "http://127.0.0.1:9", "--gpus", "4"), "--gpus .* --log"),
        (("--prometheus", "http://127.0.0.1:9"), r"http://127\.0\.0\.1:9 does not answer"),
        (("--log", "LOG", "--json", "--csv"), "--json or --csv"),
        (("--log", "LOG", "--by", "tem"), r"--by .* price\b.* 'tem'; .* team\?"),
        (("--log", "LOG", "--by", ","), "--by .* price"),
    ],
)
def test_a_mistake_is_told_with_its_values(tmp_path, words, values):
    (tmp_path / "prices.yaml").write_text("gpu_hour: 1\ngpus: [{name: H100, gpu_hours: 2}]\n")
    files = {
        "LOG": write(tmp_path, request(0, 5)),
        "EMPTY": write(tmp_path, name="empty.jsonl"),
        "PRICES": tmp_path / "prices.yaml",
    }
    status, text = run(*(files.get(word, word) for word in words))
    assert 2 == status
    assert re.search(values, " ".join(text.split()))


def test_the_help_ends_with_an_example():
    assert (
        run("--help")[1]
        .split("Options:")[0]
        .rstrip()
        .endswith("Example:  vllm-watch cost --prometheus http://127.0.0.1:9090 --since 24h")
    )


# ---- from Prometheus

MINUTES = 150
NOW_S = T0 + MINUTES * 60 + 30  # between two scrapes, so that increase() has as much to add at both ends
A_MINUTE = {  # growth by metric and labels
    attributed.TEAM_SECONDS: (
        ({"method": "tokens", "team": "red"}, 24.0), ({"method": "aborted", "team": "red"}, 6.0),
        ({"method": "tokens", "team": "blue"}, 12.0), ({"method": "tokens", "team": ABORTED}, 3.0),
        ({"method": "measured", "team": IDLE}, 10.0), ({"method": "unknown", "team": UNATTRIBUTED}, 5.0),
    ),
    attributed.ALLOCATED: (({"uuid": "GPU-1"}, 45.0), ({"uuid": "GPU-2"}, 15.0)),
    attributed.TEAM_ENERGY: (
        ({"method": "counter", "state": "active", "team": "red"}, 9000.0),
        ({"method": "counter", "state": "idle", "team": IDLE}, 6000.0),
    ),
    attributed.COST: tuple(
        ({"basis": basis, "currency": "EUR", "team": team}, amount)
        for basis, team, amount in (
            ("allocation", "red", 0.030), ("usage", "red", 0.030), ("allocation", "blue", 0.012),
            ("usage", "blue", 0.012),
            ("allocation", ABORTED, 0.003), ("usage", ABORTED, 0.003), ("allocation", IDLE, 0.010),
            ("allocation", UNATTRIBUTED, 0.005),
        )
    ),
    attributed.API_COST: (({"currency": "EUR", "team": "red"}, 0.5),),
    sidecar_series.UNREADABLE: (({"reason": "json", "team": "red"}, 2.0), ({"reason": "usage", "team": "red"}, 1.0)),
    sidecar_series.ESTIMATED_TOKENS: tuple(({"team": "red", "type": kind}, amount) for kind,
        amount in (("prompt", 60.0), ("completion", 12.0))),
    sidecar_series.TOKENS: tuple(
        ({"team": "red", "type": kind}, amount) for kind,
        amount in (("prompt", 600.0), ("cached", 200.0), ("completion", 60.0))
    ),
}  # fmt: skip


def history() -> Iterator[str]:
    """Two sidecars of one model, a sample a minute; the first loses its counters after an hour and a half, the second
    never."""
    for metric, series in A_MINUTE.items():
        yield f"# TYPE {metric.name.removesuffix('_total')} counter"
        for labels, amount in series:
            for sidecar, began in (("a", 90), ("b", None)):
                named = {"instance": sidecar, "model_name": "chat", **labels}
                text = ",".join(f'{name}="{value}"' for name, value in named.items())
                for minute in range(MINUTES + 1):
                    passed = minute - began if began is not None and minute > began else minute
                    yield f"{metric.name}{{{text}}} {amount * passed!r} {T0 + minute * 60:.0f}"
    yield f"# TYPE {gpu.INFO.name} gauge"
    for uuid, name in (("GPU-1", "NVIDIA H100 80GB HBM3"), ("GPU-2", "NVIDIA L4")):
        for minute in range(MINUTES + 1):
            yield f'{gpu.INFO.name}{{uuid="{uuid}",name="{name}"}} 1 {T0 + minute * 60:.0f}'
    yield "# EOF\n"


@pytest.fixture(scope="module")
def recorded(past, tmp_path_factory) -> Address:
    """A Prometheus that holds the history."""
    page = tmp_path_factory.mktemp("cost") / "page.om"
    page.write_text("\n".join(history()))
    return address(past(page))


def found(where: Address, since_s: float = 7200.0, prices: Prices | None = None) -> dict:
    return cost.report(asyncio.run(from_prometheus(where, BillingPeriod(NOW_S - since_s, NOW_S), prices)), "team")


@pytest.mark.prometheus
def test_recorded_sums_survive_a_sidecar_restart(recorded):
    """Each series grows on its own before the sum: the second sidecar's growth is not swallowed by the first one's
    reset."""
    result = found(recorded)
    hour_s = 2 * 120  # two sidecars, 120 minutes
    assert {
        "red": 30.0 * hour_s,
        "blue": 12.0 * hour_s,
        IDLE: 10.0 * hour_s,
        UNATTRIBUTED: 5.0 * hour_s,
        ABORTED: 3.0 * hour_s,
    } == hours(result)
    red, total = result["rows"][0], result["total"]
    assert ("EUR", pytest.approx(0.03 * hour_s), pytest.approx(0.06 * hour_s)) == (
        result["currency"],
        red["cost_usage"],
        total["cost_allocation"],
    )
    assert (pytest.approx(9000.0 * hour_s), pytest.approx(15_000.0 * hour_s)) == (red["joules"], total["joules"])
    assert tuple(pytest.approx(each * hour_s) for each in (600, 200, 60)) == (
        red["prompt_tokens"],
        red["cached_tokens"],
        red["completion_tokens"],
    )
    assert (pytest.approx(0.5 * hour_s), pytest.approx(3 * hour_s)) == (red["api_cost"], red["unreadable_requests"])
    assert pytest.approx(0.03 / 0.66) == red["usage_per_1k_tokens"]
    aborted = {
        row["team"]: pytest.approx(3600 * row["aborted_gpu_hours"])
        for row in result["rows"]
        if row["aborted_gpu_hours"]
    }
    assert {"red": 6.0 * hour_s, ABORTED: 3.0 * hour_s} == aborted
    assert tuple(pytest.approx(each * hour_s) for each in (60, 12)) == (
        red["est_prompt_tokens"],
        red["est_completion_tokens"],
    )
    assert total["gpu_hours"] == sum(row["gpu_hours"] for row in result["rows"])


@pytest.mark.prometheus
def test_other_prices_reckon_what_was_recorded_anew(recorded):
    """Three quarters of the time on an H100 at 4, a quarter on an L4 at 1: 3.25 an hour for each team's seconds;
    unknown time is no usage."""
    prices = Prices(
        gpu_hour=9.0,
        currency="USD",
        gpus=(GpuPrice("H100", 4.0), GpuPrice("L4", 1.0)),
        api=(ApiPrice("chat", 1.0, 3.0, 0.5),),
    )
    result = found(recorded, prices=prices)
    costs = {row["team"]: (row["cost_allocation"], row["cost_usage"]) for row in result["rows"]}
    assert (pytest.approx(3.25 * 2 * 120 * 30 / 3600), pytest.approx(3.25 * 2 * 120 * 30 / 3600)) == costs["red"]
    assert (pytest.approx(3.25 * 2 * 120 * 10 / 3600), 0.0) == costs[IDLE]
    assert 0.0 == costs[UNATTRIBUTED][1]
    assert pytest.approx(2 * 120 * (460 * 1.0 + 200 * 0.5 + 72 * 3.0) / 1000) == result["total"]["api_cost"], (
        "estimated tokens included"
    )


@pytest.mark.prometheus
def test_a_time_of_which_nothing_was_recorded_is_told(recorded):
    with pytest.raises(
        ValueError, match=r"http://\S+ has no vllm_watch_gpu_seconds_total .*vllm-watch cost --log FILE"
    ):
        asyncio.run(from_prometheus(recorded, BillingPeriod(T0 - 87_000, T0 - 86_400)))


@pytest.mark.prometheus
def test_the_command_asks_prometheus(recorded):
    """Its own day ends now, long after the history: that nothing is there is a sentence and no trace."""
    status, text = run("--prometheus", recorded.url, "--since", "1h")
    assert 2 == status
    assert "in this period" in text
