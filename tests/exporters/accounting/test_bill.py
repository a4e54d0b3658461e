"""A bill: a simulated month in a real Prometheus, in two time zones, by day, with FOCUS columns, and closed."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from exporters.accounting.billing_period import BillingPeriod, midnights, month_period, segments
from exporters.accounting.closed_month import close_month, read_month
from exporters.accounting.cost import CostPart, SourceTotals, TeamUse, part_of, spread_cost
from exporters.accounting.focus import focus_rows
from exporters.accounting.gpu_use import ABORTED, IDLE, UNATTRIBUTED
from stack.cli import main
from stack.cli.cost import focus_csv
from tests.support.focus_check import find_problems
from tests.support.simulated_month import CHANGE_S, END_S, GPUS, NEW, OLD, PRICES, TEAMS, SimulatedMonth, simulate

DAY_S = 86_400.0
NEW_YORK, KOLKATA = "America/New_York", "Asia/Kolkata"
MONTH = "2025-11"
EXACT = {"rel": 1e-9, "abs": 1e-12}


@pytest.fixture(scope="module")
def month() -> SimulatedMonth:
    return simulate()


@pytest.fixture(scope="module")
def recorded(month, past, tmp_path_factory) -> str:
    page = tmp_path_factory.mktemp("month") / "page.om"
    page.write_text(month.page())
    return past(page)


@pytest.fixture
def prices(tmp_path) -> Path:
    path = tmp_path / "prices.yaml"
    path.write_text(PRICES)
    return path


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["cost", *map(str, words)], env={"COLUMNS": "320"}, catch_exceptions=False)
    return done.exit_code, done.output if done.exit_code else done.stdout


def bill(*words: object) -> dict:
    status, text = run(*words, "--json")
    assert 0 == status, text
    return json.loads(text)


@pytest.mark.prometheus
@pytest.mark.parametrize("zone", [NEW_YORK, KOLKATA])
def test_every_day_and_the_month_sum_exactly(month, recorded, prices, zone):
    """Rows of a day sum to the GPUs' time at the day's prices; each team's days sum to its month."""
    report = bill(
        "--prometheus", recorded, "--month", MONTH, "--timezone", zone, "--prices", prices, "--daily", "--by",
        "team,price"
    )  # fmt: skip
    period = month_period(MONTH, zone)
    edges = [period.from_s, *midnights(period), period.to_s]
    assert 31 == len(edges)
    rows = {}
    for row in report["rows"]:
        rows.setdefault(row["period_start"], []).append(row)
    parts = sorted({*edges, CHANGE_S})
    assert [period.show(start) for start in parts[:-1]] == list(rows)
    for start, end in itertools.pairwise(parts):
        day, expected = rows[period.show(start)], month.expected_cost(start, end)
        price = OLD if start < CHANGE_S else NEW
        assert pytest.approx(GPUS * (end - start) / 3600 * price, **EXACT) == sum(row["cost_allocation"] for row in day)
        assert {team: pytest.approx(cost, **EXACT) for team, cost in expected.items() if cost} == {
            row["team"]: row["cost_allocation"] for row in day if row["cost_allocation"]
        }
        for team in TEAMS:
            mine = [row["aborted_gpu_hours"] for row in day if row["team"] == team]
            assert pytest.approx(month.expected_aborted(start, end, team), **EXACT) == sum(mine)
    expected = month.expected_cost(period.from_s, period.to_s)
    assert pytest.approx(sum(expected.values()), **EXACT) == report["total"]["cost_allocation"]
    for team in (*TEAMS, IDLE, ABORTED, UNATTRIBUTED):
        mine = [row["cost_allocation"] for row in report["rows"] if row["team"] == team]
        assert pytest.approx(expected[team], **EXACT) == sum(mine)
    assert 2 == len({row["price_version"] for row in report["rows"]}) == len(report["price_versions"])
    assert {"eu"} == {row["cluster"] for row in report["rows"]}
    assert not any("GPU hours" in note for note in report["notes"])


@pytest.mark.prometheus
def test_a_day_on_which_clocks_change_has_25_hours(recorded, prices):
    report = bill("--prometheus", recorded, "--from", "2025-11-02", "--to", "2025-11-03", "--prices", prices)
    assert pytest.approx(25 * GPUS, **EXACT) == report["total"]["gpu_hours"]
    assert ("2025-11-02T00:00:00-04:00", "2025-11-03T00:00:00-05:00") == (report["period_start"], report["period_end"])


@pytest.mark.prometheus
def test_focus_rows_pass_the_check_and_sum_to_the_bill(month, recorded, prices):
    words = ("--prometheus", recorded, "--month", MONTH, "--timezone", KOLKATA, "--prices", prices, "--focus")
    status, text = run(*words, "--csv", "--issuer", "Example Ltd")
    assert 0 == status
    table = list(csv.DictReader(io.StringIO(text)))
    assert [] == find_problems(table)
    period = month_period(MONTH, KOLKATA)
    expected = month.expected_cost(period.from_s, period.to_s)
    assert pytest.approx(sum(expected.values()), **EXACT) == sum(float(row["BilledCost"]) for row in table)
    for team in TEAMS:
        mine = [row for row in table if row["SubAccountId"] == team]
        assert pytest.approx(expected[team], **EXACT) == sum(float(row["EffectiveCost"]) for row in mine)
        assert pytest.approx(month.expected_aborted(period.from_s, period.to_s, team), **EXACT) == sum(
            float(row["x_AbortedGpuHours"]) for row in mine
        )
    assert json.loads(run(*words, "--json", "--issuer", "Example Ltd")[1])[0]["BilledCost"] == float(
        table[0]["BilledCost"]
    )


def focus(totals: SourceTotals) -> list[dict[str, str]]:
    table = list(csv.DictReader(io.StringIO(focus_csv(focus_rows(totals, "a")))))
    assert [] == find_problems(table)
    return table


@pytest.mark.parametrize(
    ("start_s", "length_s"), [(0.25, 0.1), (0.95, 0.1), (5.0, 0.001), (DAY_S - 0.05, 0.1), (0.5, DAY_S), (7.0, 3.0)]
)
def test_focus_periods_are_whole_seconds_without_gaps(start_s, length_s):
    totals = SourceTotals("log", BillingPeriod(start_s, start_s + length_s), "EUR", known={"cost"})
    for cut in segments(totals.period):
        totals.parts[part_of(cut, "")]["t", "m"] = TeamUse(seconds=0.1, cost_allocation=0.2)
    table = focus(totals)
    assert [row["ChargePeriodEnd"] for row in table[:-1]] == [row["ChargePeriodStart"] for row in table[1:]]
    for row in table:
        ends = table[0]["ChargePeriodStart"], table[-1]["ChargePeriodEnd"]
        assert ends == (row["BillingPeriodStart"], row["BillingPeriodEnd"])


@pytest.mark.parametrize(
    ("uses", "spread", "expected"),
    [
        ({"a": (1, 2), "b": (3, 6)}, (), {"a": (2, 1, 1), "b": (2, 3, 3)}),
        ({"a": (1, 2), IDLE: (3, 6)}, ("idle",), {"a": (2, 1, 4), IDLE: (2, 3, 0)}),
        ({"a": (1, 2), "b": (1, 4)}, (), {"a": (3, 1, 2 / 3), "b": (3, 1, 4 / 3)}),  # GPUs of two prices
        ({"a": (1, 0), "b": (2, 0)}, (), {"a": (0, 1, 1), "b": (0, 2, 2)}),  # the sidecar had no prices then
        ({"a": (1, 2), "other model": (0, 0)}, (), {"a": (2, 1, 1), "other model": (2, 0, 0)}),
    ],
)
def test_focus_unit_price_times_quantity_is_the_cost(uses, spread, expected):
    totals = SourceTotals("log", BillingPeriod(0, 60), "EUR", known={"cost"})
    for team, (hours, cost) in uses.items():
        used = 0 if team == IDLE else cost
        model = "n" if team == "other model" else "m"
        totals.parts[CostPart(0, 60)][team, model] = TeamUse(hours * 3600, cost_allocation=cost, cost_usage=used)
    spread_cost(totals, spread)
    names = ("ListUnitPrice", "ConsumedQuantity", "PricingQuantity")
    assert {team: pytest.approx(values) for team, values in expected.items()} == {
        row["SubAccountId"]: tuple(float(row[name]) for name in names) for row in focus(totals)
    }


def test_focus_has_a_price_only_where_a_gpu_was():
    """Without any GPU time there is none: null, not 0."""
    totals = SourceTotals("log", BillingPeriod(0, 60), "EUR", known={"cost"})
    totals.parts[CostPart(0, 60)]["t", "m"] = TeamUse(prompt_tokens=1)
    assert [None] == [row["ListUnitPrice"] for row in focus_rows(totals, "a")]


@pytest.mark.parametrize(
    ("cluster", "team", "model", "resource", "tags"),
    [
        ("eu", "t", "m", ("eu/m", "m"), {"vllm-watch/cluster": "eu", "vllm-watch/model": "m", "vllm-watch/team": "t"}),
        ("", "t", "m", ("m", None), {"vllm-watch/model": "m", "vllm-watch/team": "t"}),
        ("", IDLE, "m", ("m", None), {"vllm-watch/model": "m"}),
        ("", UNATTRIBUTED, "__none__", ("__none__", None), None),
    ],
)
def test_focus_names_what_is_known(cluster, team, model, resource, tags):
    totals = SourceTotals("log", BillingPeriod(0, 60), "EUR", known={"cost"})
    totals.parts[CostPart(0, 60, cluster)][team, model] = TeamUse(60, cost_allocation=1.0)
    (row,) = focus_rows(totals, "a")
    assert resource == (row["ResourceId"], row["ResourceName"])
    assert tags == (row["Tags"] and json.loads(row["Tags"]))
    assert "" not in row.values()
    assert 1 == len(focus(totals))
    with pytest.raises(ValueError, match="--issuer is empty"):
        focus_rows(totals, " ")


@pytest.mark.prometheus
def test_spread_rows_are_carried_by_the_teams(month, recorded, prices):
    words = ("--prometheus", recorded, "--month", MONTH, "--prices", prices, "--by", "team")
    plain, report = bill(*words), bill(*words, "--spread", "idle,aborted,unattributed")
    costs = {row["team"]: 0.0 for row in report["rows"]}
    for row in report["rows"]:
        costs[row["team"]] += row["cost_allocation"]
    assert [0.0, 0.0, 0.0] == [costs[team] for team in (IDLE, ABORTED, UNATTRIBUTED)]
    assert pytest.approx(plain["total"]["cost_allocation"], **EXACT) == sum(costs.values())
    assert ["idle", "aborted", "unattributed"] == report["spread"]
    assert plain["total"]["cost_usage"] == report["total"]["cost_usage"]


@pytest.mark.prometheus
def test_a_closed_month_stays_as_it_was(recorded, prices, tmp_path):
    """It is read without Prometheus, whatever the prices are now; it is not closed twice, nor read when changed."""
    folder = tmp_path / "bills"
    asked = ("--month", MONTH, "--bills", folder)
    first = bill("--prometheus", recorded, *asked, "--prices", prices, "--timezone", KOLKATA, "--close", "--daily")
    path = folder / f"{MONTH}.json"
    assert (0o444, ["2025-11.json"]) == (path.stat().st_mode & 0o777, [each.name for each in folder.iterdir()])
    prices.write_text("gpu_hour: 99\n")
    again = bill(*asked, "--prices", prices, "--daily")
    for name in ("rows", "total", "price_versions", "timezone", "period_start"):
        assert first[name] == again[name]
    assert any("closed month" in note and "--prices" in note for note in again["notes"])
    for words, value in (
        (("--prometheus", recorded, "--prices", prices, "--close"), f"; see {folder}"),
        (("--timezone", NEW_YORK), "closed in Asia/Kolkata"),
        (("--spread", "idle"), "closed with --spread of nothing"),
    ):
        status, text = run(*asked, *words)
        assert (2, True) == (status, value in " ".join(text.split())), text
    path.chmod(0o644)
    path.write_text(path.read_text().replace('"team": "tiny"', '"team": "huge"', 1))
    status, text = run(*asked)
    assert (2, True) == (status, f"{path} was changed" in " ".join(text.split())), text


def test_a_month_that_an_earlier_release_closed_is_read(tmp_path):
    totals = SourceTotals("log", month_period(MONTH, "UTC"), "EUR", known={"cost"})
    totals.parts[CostPart(totals.period.from_s, totals.period.to_s)]["t", "m"] = TeamUse(seconds=1.5)
    path = close_month(totals, tmp_path, END_S)
    content = json.loads(path.read_text()) | {"digest": ""}
    del content["rows"][0]["use"]["unreadable_requests"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.chmod(0o644)
    path.write_text(json.dumps(content | {"digest": hashlib.sha256(text.encode()).hexdigest()}))
    assert read_month(tmp_path, MONTH).parts == totals.parts


@pytest.mark.prometheus
def test_missing_prices_are_said_and_close_nothing(recorded, tmp_path):
    status, text = run("--prometheus", recorded, "--month", MONTH)
    assert 0 == status
    assert re.search("^note: no cost .* `prices`", text, re.MULTILINE)
    for more, key in ((("--bills", tmp_path, "--close"), "has no cost"), (("--focus", "--csv"), "need a cost")):
        status, text = run("--prometheus", recorded, "--month", MONTH, *more)
        assert (2, True) == (status, key in " ".join(text.split())), text
    assert [] == list(tmp_path.iterdir())


@pytest.mark.prometheus
def test_every_output_has_aborted_part_period_and_prices(recorded, prices):
    words = ("--prometheus", recorded, "--month", MONTH, "--prices", prices, "--by", "team")
    _, text = run(*words)
    assert "of which aborted" in text
    assert "period: 2025-11-01T00:00:00-04:00 to 2025-12-01T00:00:00-05:00 (America/New_York), cluster: eu" in text
    table = list(csv.DictReader(io.StringIO(run(*words, "--csv")[1])))
    report = bill(*words)
    for name in ("aborted_gpu_hours", "period_start", "period_end", "cluster", "price_version", "aborted_cost"):
        assert [str(row[name]) for row in report["rows"]] == [row[name] for row in table[:-1]]
    tiny = next(line for line in text.splitlines() if "tiny" in line).replace("│", " ").split()
    assert float(tiny[4]) > 0, "the allocated cost of a small team"


@pytest.mark.parametrize(("bad", "closes"), [(1, True), (3, False)])
def test_month_with_bad_lines_stays_open(tmp_path, bad, closes):
    """More than one line in a thousand is refused, unless it is allowed."""
    line = '{{"request_id":"{}","ts":"2025-11-05T00:00:00Z","e2e_ms":1000,"outcome":"{}"}}\n'
    log, prices = tmp_path / "log", tmp_path / "prices.yaml"
    log.write_text("".join(line.format(n, "ok") for n in range(2000)) + line.format("x", "fine") * bad)
    prices.write_text("{currency: EUR, gpu_hour: 2.0}")
    words = ("--log", log, "--month", MONTH, "--prices", prices, "--bills", tmp_path / "bills", "--close")
    status, text = run(*words)
    assert (0 if closes else 2) == status
    if not closes:
        assert f"{log}:2001" in text
        assert 0 == run(*words, "--allow-bad-lines")[0]


def test_a_month_that_is_not_over_is_not_closed(tmp_path):
    log = tmp_path / "requests.jsonl"
    log.write_text("")
    for words, values in (
        (("--month", "2999-01"), "2999-01-01T00:00:00.* future"),
        (("--month", "2025-13"), "'2025-13' .* 2026-10"),
        (("--month", MONTH, "--timezone", "Berlin"), "'Berlin' .* Europe/Berlin"),
        (("--month", MONTH, "--since", "1d"), "--month, --from and --since"),
        (("--to", "2025-11-02"), "--to needs --from"),
        (("--from", "2025-11-02", "--to", "2025-11-01"), "before it starts"),
        (("--from", "yesterday"), "'yesterday' .* 2026-10-16"),
        (("--month", MONTH, "--close"), "--close needs --month and --bills DIR"),
        (("--month", MONTH, "--spread", "all"), "holds no request"),
    ):
        status, text = run("--log", log, *words)
        assert 2 == status
        assert re.search(values, " ".join(text.split())), text


def test_the_check_finds_what_is_wrong():
    """The check that stands for a validator finds each kind of mistake."""
    row = {
        "BilledCost": "1.5", "BillingAccountId": "a", "BillingAccountName": "", "BillingCurrency": "EUR",
        "BillingPeriodStart": "2025-11-01T00:00:00Z", "BillingPeriodEnd": "2025-12-01T00:00:00Z",
        "ChargeCategory": "Usage", "ChargeClass": "", "ChargeDescription": "",
        "ChargePeriodEnd": "2025-11-02T00:00:00Z",
        "ChargePeriodStart": "2025-11-01T00:00:00Z", "ContractedCost": "1e-05", "EffectiveCost": "1.5",
        "HostProviderName": "a", "InvoiceIssuerName": "a", "ListCost": "1.5", "PricingQuantity": "0.5",
        "PricingUnit": "GPU-Hours", "ConsumedQuantity": "0.5", "ConsumedUnit": "GPU-Hours", "ListUnitPrice": "3.0",
        "ContractedUnitPrice": "2E-5", "PricingCategory": "Standard", "SkuId": "s", "SkuMeter": "GPU Time",
        "SkuPriceId": "s", "ResourceId": "eu/m", "ResourceName": "m", "ResourceType": "Model",
        "ProviderName": "a", "PublisherName": "a", "ServiceCategory": "AI and Machine Learning", "ServiceName": "vLLM",
        "ServiceProviderName": "a", "Tags": '{"vllm-watch/team": "a"}',
    }  # fmt: skip
    assert [] == find_problems([row])
    tax = dict.fromkeys(
        ("ContractedUnitPrice", "ListUnitPrice", "PricingCategory", "PricingQuantity", "PricingUnit", "SkuId",
         "SkuMeter", "SkuPriceId", "ConsumedQuantity", "ConsumedUnit"), "",
    )  # fmt: skip
    assert [] == find_problems([row | tax | {"ChargeCategory": "Tax", "ContractedCost": "1.5"}])
    assert [] == find_problems([row | {"ChargeClass": "Correction", "ListCost": "-2"}])
    assert any("of ListUnitPrice" in found for found in find_problems([row, row | {"ListUnitPrice": "2"}]))
    for change, problem in (
        *(({name: ""}, f"{name} is empty") for name in tax if name not in ("PricingUnit", "ConsumedUnit", "SkuMeter")),
        ({"ChargeCategory": "Tax"}, "SkuId in Tax"),
        ({"ListUnitPrice": "3.1"}, "ListUnitPrice x PricingQuantity"),
        ({"ContractedUnitPrice": ""}, "ContractedCost without"),
        ({"ListUnitPrice": "-3"}, "ListUnitPrice is '-3'"),
        ({"ResourceName": "eu/m"}, "ResourceName repeats ResourceId"),
        ({"ResourceId": ""}, "ResourceName without ResourceId"),
        ({"ResourceType": ""}, "ResourceId and ResourceType"),
        ({"PricingUnit": ""}, "PricingQuantity and PricingUnit"),
        ({"Tags": '{"team": "a"}'}, "Tags has 'team'"),
        ({"Tags": '{"vllm-watch/cluster": ""}'}, "Tags has 'vllm-watch/cluster'"),
        ({"SkuPriceDetails": '{"Gpus": 1}'}, "SkuPriceDetails has 'Gpus'"),
        ({"BillingCurrency": "EURO"}, "BillingCurrency is 'EURO'"),
        ({"ChargeCategory": "Use"}, "ChargeCategory is 'Use'"),
        ({"BilledCost": ""}, "BilledCost is empty"),
        ({"ChargePeriodStart": "2025-11-01"}, "ChargePeriodStart is '2025-11-01'"),
        ({"ChargePeriodEnd": "2025-12-02T00:00:00Z"}, "billing period"),
        ({"Team": "a"}, "Team is no"),
    ):
        assert any(problem in found for found in find_problems([row | change]))
    assert ["row 0: ListCost is missing"] == find_problems([{k: v for k, v in row.items() if k != "ListCost"}])


def test_the_simulation_covers_the_month():
    assert month_period(MONTH, NEW_YORK).to_s < END_S
