"""prices.yaml: what a GPU's hour costs, and mistakes that lead to their place."""

import msgspec
import pytest

from exporters.accounting.prices import ApiPrice, GpuPrice, Prices
from stack import config

FILE = """\
currency: EUR
gpu_hour: 2.0
gpus:
  - {name: H100, gpu_hour: 3.0, mig: {1g.10gb: 0.6}}
  - {name: H100 NVL, gpu_hour: 3.5}
api:
  - {model: chat, input_per_1k: 0.001, output_per_1k: 0.003, cached_input_per_1k: 0.0005}
  - {model: "*", input_per_1k: 0.002, output_per_1k: 0.006}
"""
PRICES = config.parse(FILE, Prices, "prices.yaml")


@pytest.mark.parametrize(
    ("name", "fraction", "profile", "an_hour"),
    [
        ("NVIDIA H100 80GB HBM3", 1.0, None, 3.0), ("NVIDIA H100 NVL", 1.0, None, 3.5), ("nvidia h100", 1.0, None, 3.0),
        ("NVIDIA L4", 1.0, None, 2.0), (None, 1.0, None, 2.0), ("NVIDIA H100 80GB HBM3", 1 / 7, "1g.10gb", 0.6),
        ("NVIDIA H100 80GB HBM3", 3 / 7, "3g.40gb", 9 / 7),
        ("NVIDIA A100", 3 / 7, "3g.20gb", 6 / 7),
    ],
)  # fmt: skip
def test_a_card_costs_what_the_longest_name_in_its_own_says(name, fraction, profile, an_hour):
    """An instance costs what its profile says, else its part of the GPU."""
    assert pytest.approx(an_hour) == PRICES.per_hour(name, fraction, profile)


def test_a_model_has_its_own_api_price_or_that_of_any():
    assert pytest.approx(0.0016) == PRICES.api_price("chat").cost(1000, 0, 200)
    assert pytest.approx(0.0008 + 0.0001) == PRICES.api_price("chat").cost(1000, 200, 0)
    assert pytest.approx(0.002) == PRICES.api_price("other").cost(1000, 200, 0)
    assert Prices(gpu_hour=1.0, api=(ApiPrice("chat", 1, 1),)).api_price("other") is None


def test_the_short_form_is_enough():
    assert (
        Prices(gpu_hour=2.5, budget_per_1k_tokens=0.002, currency="USD")
        == config.parse(  # type: ignore[attr-defined]
            "prices: {gpu_hour: 2.5, budget_per_1k_tokens: 0.002, currency: USD}",
            msgspec.defstruct("Some", [("prices", Prices)]),
            "sidecar.yaml",
        ).prices
    )


@pytest.mark.parametrize(
    ("line", "instead", "values"),
    [
        ("gpu_hour: 2.0", "gpu_hours: 2.0", r"prices\.yaml, line 2: gpu_hours .* gpu_hour\?"),
        ("currency: EUR\ngpu_hour: 2.0", "currency: EUR", r"prices\.yaml: gpu_hour is missing"),
        ("gpu_hour: 2.0", "gpu_hour: -1", r"prices\.yaml: prices .* 0; .*`prices`"),
        ("gpu_hour: 2.0", "gpu_hour: .inf", r"prices\.yaml: prices .* 0; .*`prices`"),
        ("gpu_hour: 3.0,", "gpu_hour: 0,", r"line 4: gpus\[0\]: gpu_hour: .*greater than 0$"),
        ("gpu_hour: 3.0,", "hour: 3.0,", r"line 4: gpus\[0\]\.hour .* gpu_hour\?"),
        ("1g.10gb: 0.6", "1g10: 0.6", r"line 4: gpus\[0\]: mig .*'1g10'.* 1g\.10gb.*`nvidia-smi -L`"),
        ("name: H100 NVL", "name: h100", "gpus has 'h100' twice"),
        ("model: chat", 'model: "*"', r"api has '\*' twice"),
        ("input_per_1k: 0.001", "input_per_1k: -0.001", r"line 7: api\[0\]: input_per_1k is -0\.001"),
        ("output_per_1k: 0.003", "output: 0.003", r"line 7: api\[0\]\.output .* output_per_1k\?"),
        ("currency: EUR", "currency: ''", "line 1: currency is empty"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_the_right_word(line, instead, values):
    assert line in FILE
    with pytest.raises(config.BadConfig, match=values):
        config.parse(FILE.replace(line, instead, 1), Prices, "prices.yaml")


def test_a_card_without_a_name_is_no_line():
    with pytest.raises(ValueError, match=r"^name .* H100; .*gpu_hour"):
        GpuPrice("", 1.0)


CHANGES = """\
currency: EUR
gpu_hour: 2.0
timezone: Europe/Berlin
gpus: [{name: H100, gpu_hour: 3.0}]
changes:
  - {valid_from: 2026-10-16, gpu_hour: 2.5}
  - {valid_from: "2026-10-25T12:00", gpus: [{name: H100, gpu_hour: 4.0}]}
  - {valid_from: 2026-10-26T00:00:00Z, budget_per_1k_tokens: 0.1}
"""


def test_prices_change_at_their_moment_in_their_zone():
    """What a change does not name stays; a time without an offset is of the zone, also on the day clocks change."""
    prices = config.parse(CHANGES, Prices, "prices.yaml")
    versions = prices.versions()
    assert [2.0, 2.5, 2.5, 2.5] == [each.prices.per_hour("L4") for each in versions]
    assert [3.0, 3.0, 4.0, 4.0] == [each.prices.per_hour("H100") for each in versions]
    assert [1_792_101_600, 1_792_926_000, 1_792_972_800] == [each.from_s for each in versions[1:]]
    assert (2.0, 2.5, 0.1) == (
        prices.at(1_792_101_599).gpu_hour,
        prices.at(1_792_101_600).gpu_hour,
        prices.at(1_792_972_800).budget_per_1k_tokens,
    )
    assert ["base", "2026-10-16", "2026-10-25T12:00", "2026-10-26T01:00"] == [
        each.name.rpartition("-")[0] for each in versions
    ]


def test_a_version_names_its_content():
    """An edit of a price in the past has another name, so two bills that differ do not look alike."""
    one, other = Prices(gpu_hour=2.0), Prices(gpu_hour=2.1)
    assert one.versions()[0].name != other.versions()[0].name
    assert one.versions()[0].name == Prices(gpu_hour=2.0, timezone="Asia/Kolkata").versions()[0].name


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("{valid_from: 2026-10-30}", r"line 9: changes\[3\]: .*2026-10-30; .*gpu_hour, gpus, api or budget_per_1k"),
        ("{valid_from: soon, gpu_hour: 1}", r"line 9: changes\[3\]: 'soon' .* 2026-10-16 "),
        ("{valid_from: 2026-10-30, gpu_hour: 0}", r"line 9: changes\[3\]: gpu_hour: .*greater than 0$"),
        ("{valid_from: 2026-10-01, gpu_hour: 1}", "changes: 2026-10-01-.* 2026-10-26T01:00-.*valid_from"),
        ("{valid_from: 2026-10-30T00:00:30Z, gpu_hour: 1}", r"changes\[3\]: valid_from .*00:00:30.*whole minute"),
        ("{valid_from: 2026-10-30, hour: 1}", r"line 9: changes\[3\]\.hour .* gpu_hour\?"),
    ],
)
def test_a_change_that_is_wrong_names_its_place(line, values):
    with pytest.raises(config.BadConfig, match=values):
        config.parse(f"{CHANGES}  - {line}\n", Prices, "prices.yaml")


def test_an_unknown_zone_is_refused():
    with pytest.raises(config.BadConfig, match=r"line 3: timezone 'Berlin' .* Europe/Berlin"):
        config.parse(CHANGES.replace("Europe/Berlin", "Berlin"), Prices, "prices.yaml")
