"""What `vllm-watch gateway check` says of teams.yaml and gateway.yaml."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from stack import cli
from stack.cli import gateway as commands
from stack.gateway import check
from stack.gateway.admission import Admission
from stack.gateway.policy import Policy
from stack.gateway.teams import hashed, load_policy

EXAMPLE = Path(__file__).parents[3] / "stack/deploy/teams.example.yaml"
TEAMS = f"""\
teams:
  chat: {{keys: [{hashed("a")}, {hashed("b")}], band: gold, weight: 3, max_running: 8, max_output_tokens: 500, models: [small, sql]}}
  search: {{keys: [{hashed("c")}], band: gold, max_in_flight: 20, max_outputs: 4, max_logprobs: 5, max_prompt_logprobs: 0, over_output: refuse, fallback_api: true}}
  lab: {{keys: [{hashed("d")}], band: rest}}
bands:
  rest: {{rank: 1, ceiling: 0.5, floor: 1, engine_priority: 3, total_s: 60}}
  gold: {{rank: 0, max_wait_s: 15}}
capacity: {{slots: 25, tokens: 90000, queue: 100, waiting: 3, min_slots: 2}}
models:
  big: {{upstreams: [a, b, c], fallbacks: [rented], max_model_len: 32768}}
  small: {{aliases: [tiny, mini], adapters: [sql]}}
upstreams:
  a: {{url: "http://h:1", weight: 95, max_prompt_tokens: 4000}}
  b: {{url: "http://h:2", weight: 5, variant: canary, max_prompt_tokens: 4000}}
  c: {{url: "http://h:3", min_prompt_tokens: 4001}}
  rented: {{url: "https://api.example.com", kind: api, model: big-1}}
"""  # noqa: E501


def written(tmp_path: Path, **texts: str) -> Path:
    """Files by name without .yaml; the first."""
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path / f"{next(iter(texts))}.yaml"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["gateway", "check", *map(str, arguments)])


def told(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(path, "--json").stdout)
    return found


def rows(lines: list[str]) -> list[str]:
    """Lines of tables, the cells of each with | between them."""
    return [re.sub("  +", "|", line.strip()) for line in lines if "  " in line.strip()]


def test_a_file_in_words_and_numbers(tmp_path: Path):
    path = written(tmp_path, teams=TEAMS)
    result = run(path)
    assert 0 == result.exit_code
    head, slots, fewer, *tables, in_flight, outputs, logprobs, verdict = result.stdout.splitlines()
    assert (str(path), "in order") == (head, verdict)
    assert (["25", "90000", "100"], ["2", "3", "90"]) == (re.findall(r"\d+", slots), re.findall(r"\d+", fewer))
    assert [
        "band|rank|slots at most|slots first|in engines|waits at most|first token|next token|whole reply",
        "gold|0|25 (100 %)|0|0|15 s|as gateway.yaml|as gateway.yaml|as gateway.yaml",
        "rest|1|12 (50 %)|1|3|60 s|as gateway.yaml|as gateway.yaml|60 s",
        (
            "team|band|weight|share|running|in flight|prompt tokens|output tokens|texts|logprobs|of prompts|keys|models"
            "|api"
        ),
        "chat|gold|3|75 %|8|-|-|500 (clamp)|8|-|-|2|small, sql|no",
        "search|gold|1|25 %|-|20|-|-|4|5|0|1|all|yes",
        "lab|rest|1|100 %|-|-|-|-|-|-|-|1|all|no",
        "model|aliases|adapters|tokens at most|upstreams|fallbacks",
        "big|none|none|32768|a, b, c|rented",
        "small|tiny, mini|sql|-|a, b, c|none",
        "upstream|kind|prompts|variant|weight|asked for|address",
        "a|engine|1 to 4000|stable|95|the same name|http://h:1",
        "b|engine|1 to 4000|canary|5|the same name|http://h:2",
        "c|engine|4001 and more|stable|1|the same name|http://h:3",
        "rented|api|all|stable|1|big-1|https://api.example.com",
        "model|prompts|variant|gets|upstream|gets",
        "big|1 to 4000|stable|95 %|a|95 %",
        "big|1 to 4000|canary|5 %|b|5 %",
        "big|4001 and more|stable|100 %|c|100 %",
        "small|1 to 4000|stable|95 %|a|95 %",
        "small|1 to 4000|canary|5 %|b|5 %",
        "small|4001 and more|stable|100 %|c|100 %",
    ] == rows(tables)
    for warning, found in (
        (in_flight, r"2 of 3 .*max_in_flight \(chat, lab\)"),
        (outputs, r"1 of 3 .*max_outputs or max_running \(lab\)"),
        (logprobs, r"2 of 3 .*max_prompt_logprobs \(chat, lab\)"),
    ):
        assert re.match(rf"warning: {path}, line 1: teams: {found}", warning)


def test_the_smallest_file_says_what_holds_all_the_same(tmp_path: Path):
    """Shipped bands, and what is left to gateway.yaml and to the engine."""
    path = written(tmp_path, teams=f"teams: {{a: {{keys: [{hashed('a')}]}}}}")
    head, slots, fewer, *tables, _, verdict = run(path).stdout.splitlines()
    assert (str(path), "in order") == (head, verdict)
    assert (["256", "1024"], ["4", "5", "90"]) == (re.findall(r"\d+", slots), re.findall(r"\d+", fewer))
    assert [
        "demo|0|256 (100 %)|0|0|15 s|as gateway.yaml|as gateway.yaml|as gateway.yaml",
        "replay|0|256 (100 %)|0|0|30 s|as gateway.yaml|as gateway.yaml|as gateway.yaml",
        "default|1|256 (100 %)|0|0|60 s|as gateway.yaml|as gateway.yaml|as gateway.yaml",
        "experimental|2|204 (80 %)|2|0|120 s|as gateway.yaml|as gateway.yaml|as gateway.yaml",
        "a|default|1|100 %|-|-|-|-|-|-|-|1|all|no",
    ] == [row for row in rows(tables) if not row.startswith(("band|", "team|"))]
    models, upstreams = (line for line in tables if ": " in line)
    assert models.startswith("models: any,")
    assert upstreams.startswith("upstreams: ")
    assert upstreams.endswith(" gateway.yaml")


def test_gateway_configuration_leads_to_its_teams(tmp_path: Path):
    """A configuration of the gateway leads to its teams and fills what they leave open."""
    path = written(
        tmp_path,
        gateway="upstream: http://h:1\nteams: who.yaml\ntimeouts: {prefill_s: 9}",
        who="teams: {a: {}}\nbands: {default: {rank: 0}}",
    )
    found = told(path)
    assert [str(path), str(tmp_path / "who.yaml")] == found["files"]
    assert (9.0, 120.0, 1800.0) == tuple(found["bands"][0][name] for name in ("prefill_s", "decode_s", "total_s"))
    assert [("h:1", "http://h:1")] == [(one["upstream"], one["url"]) for one in found["upstreams"]]
    assert [(None, "h:1", 1.0)] == [(one["model"], one["upstream"], one["share"]) for one in found["shares"]]
    assert "  any    all      stable   100 %  h:1       100 %\n" in run(path).stdout


@pytest.mark.parametrize(
    ("gateway", "teams", "mistakes"),
    [
        ("upstream: h:1\n#", None, [r"gateway\.yaml, line 1: upstream 'h:1' .*http://127\.0\.0\.1:8001$"]),
        ("listen: 127.0.0.1:1\nupstrem: http://h:1", None, [r"gateway\.yaml, line 2: upstrem .*\bupstream\?"]),
        ("upstream: http://h:1", None, [r"teams\.yaml .*: No such file"]),
        (
            "upstream: http://h:1\nanonymous_team: b\nupstream_key_file: key",
            "teams:\n  a: {band: demmo}\ncapacity: {slots: 0}",
            [
                r"gateway\.yaml, line 3: upstream_key_file: FOLDER/key .*: No such file",
                r"teams\.yaml, line 3: capacity\.slots: 0 .*more than 0",
                r"teams\.yaml, line 2: teams\.a\.band: 'demmo' .*\bdemo\?",
                r"teams\.yaml, line 3: capacity\.slots: 0 .*floors .*\(2\)",
                r"gateway\.yaml, line 2: anonymous_team: b .*FOLDER/teams\.yaml; .*null",
            ],
        ),
        ("teams: teams.yaml", None, [r"teams\.yaml .*: No such file"]),
        (
            "teams: teams.yaml",
            "teams: {}",
            [r"gateway\.yaml: upstream: .*FOLDER/teams\.yaml .*`upstream: http://HOST:PORT` .*`upstreams`"],
        ),
        ("- a", None, [r"gateway\.yaml: .*`object`, .*`array`"]),
    ],
)
def test_every_mistake_is_told_at_once_and_nothing_else(
    tmp_path: Path, gateway: str, teams: str | None, mistakes: list[str]
):
    path = written(tmp_path, gateway=gateway, **({"teams": teams} if teams else {}))
    report = told(path)
    for mistake, pattern in zip(report["mistakes"], mistakes, strict=True):
        assert re.match(f"FOLDER/{pattern}".replace("FOLDER", str(tmp_path)), mistake)
    result = run(path)
    assert (1, "\n".join([*(f"mistake: {mistake}" for mistake in report["mistakes"]), "not in order\n"])) == (
        result.exit_code,
        result.stdout,
    )
    assert [] == report["warnings"]
    assert 1 == run(path, "--json").exit_code


def test_keys_are_shown_neither_as_text_nor_as_hashes(tmp_path: Path):
    entry = hashed("a")
    output = run(written(tmp_path, teams=f"teams: {{a: {{keys: [{entry}]}}}}"), "--json").stdout
    assert (1, False) == (json.loads(output)["teams"][0]["keys"], entry in output)
    key = "vw-a-" + "0Aa_" * 8
    assert key not in run(written(tmp_path, teams=f"teams: {{a: {{{key}: }}}}")).output


API = "u: {url: 'http://h'}\n  w: {url: 'http://h', kind: api}"
KEYS = f"keys: [{hashed('a')}]"
ENGINES = "u: {url: 'http://h:1'}\n  v: {url: 'http://h:2', variant: canary, weight: 2}"
# A file, and patterns of the place and the values that each warning names.
WARNINGS = {
    "nobody": (
        "bands: {default: {rank: 0}}\ncapacity: {}",
        [r"teams\.yaml: teams: .*nobody", r"teams\.yaml, line 1: bands\.default: no team"],
    ),
    "no keys": (
        "teams:\n  a: {}",
        [r"teams\.yaml, line 2: teams\.a: .*no keys.*\banonymous_team .*; vllm-watch gateway key a "],
    ),
    "never reached": (
        f"teams:\n  a:\n    {KEYS}\n    max_running: 9\n    max_in_flight: 4\n    max_outputs: 2",
        [r"teams\.yaml, line 4: teams\.a\.max_running: 9 .*\bmax_in_flight is 4 and max_outputs 2$"],
    ),
    "no bound": (
        (
            f"teams:\n  a: {{{KEYS}, max_prompt_logprobs: 0}}\n"
            f"  b: {{keys: [{hashed('b')}], max_in_flight: 9, max_outputs: 1}}"
        ),
        [
            r"teams\.yaml, line 1: teams: 1 of 2 .*\bmax_in_flight \(a\)",
            r"teams\.yaml, line 1: teams: 1 of 2 .*\bmax_running \(a\)",
            r"teams\.yaml, line 1: teams: 1 of 2 .*\bmax_prompt_logprobs \(b\)",
        ],
    ),
    "unused band": (
        f"teams: {{a: {{{KEYS}}}}}\nbands:\n  default: {{rank: 0}}\n  x: {{rank: 1}}",
        [r"teams\.yaml, line 4: bands\.x: no team"],
    ),
    "long wait": (
        f"teams: {{a: {{{KEYS}}}}}\nbands:\n  default:\n    rank: 0\n    max_wait_s: 121",
        [r"teams\.yaml, line 5: bands\.default\.max_wait_s: 121 s .*\bRetry-After .*\b120 s$"],
    ),
    "hidden model": (
        f"teams: {{a: {{{KEYS}, models: [x, z]}}}}\nmodels:\n  w: {{aliases: [x]}}\n  y: {{}}\n  v: {{adapters: [z]}}",
        [r"teams\.yaml, line 4: models\.y: no team"],
    ),
    "large canary": (
        f"teams: {{a: {{{KEYS}}}}}\nupstreams:\n  {ENGINES}",
        [r"teams\.yaml, line 4: upstreams\.v\.variant: .*\b66\.67 % .*\bany model$"],
    ),
    "api that nobody lists": (
        f"teams: {{a: {{{KEYS}, fallback_api: true}}}}\nupstreams:\n  {API}",
        [r"teams\.yaml, line 4: upstreams\.w: .*\bkind api\b.*\bno model\b.*\bfallbacks\b"],
    ),
    "api for nobody": (
        f"teams: {{a: {{{KEYS}}}}}\nmodels: {{m: {{fallbacks: [w]}}}}\nupstreams:\n  {API}",
        [r"teams\.yaml, line 5: upstreams\.w: .*\bkind api\b.*\bno team\b.*\bfallback_api\b"],
    ),
}


@pytest.mark.parametrize("odd", WARNINGS)
def test_what_is_odd_is_a_warning_and_still_in_order(tmp_path: Path, odd: str):
    text, patterns = WARNINGS[odd]
    path = written(tmp_path, teams=text)
    warnings = told(path)["warnings"]
    for warning, pattern in zip(warnings, patterns, strict=True):
        assert re.match(f"{tmp_path}/{pattern}", warning)
    result = run(path)
    assert (0, True) == (
        result.exit_code,
        result.stdout.endswith("".join(f"warning: {warning}\n" for warning in warnings) + "in order\n"),
    )


def test_anonymous_team_needs_no_keys(tmp_path: Path):
    """A team without keys is not odd where it is the anonymous one."""
    path = written(tmp_path, gateway="{upstream: 'http://h:1', anonymous_team: a}", teams="teams: {a: {}, b: {}}")
    keys, in_flight, *_ = told(path)["warnings"]
    assert re.match(rf"{tmp_path}/teams\.yaml: teams\.b: .*no keys.*; vllm-watch .*\bkey b ", keys)
    assert "anonymous_team" not in keys.removeprefix(str(tmp_path))
    assert re.match(rf"{tmp_path}/teams\.yaml: teams: 2 of 2 .*max_in_flight \(a, b\)", in_flight)


def test_half_of_the_requests_are_not_yet_too_many_for_a_canary(tmp_path: Path):
    path = written(
        tmp_path, teams=f"teams: {{a: {{{KEYS}}}}}\nupstreams:\n  {ENGINES.replace('weight: 2', 'weight: 1')}"
    )
    assert [] == told(path)["warnings"]


def test_key_files_that_everybody_may_read_are_a_warning(tmp_path: Path):
    for name, mode in (("engine", 0o644), ("open", 0o604), ("closed", 0o640)):
        (tmp_path / name).write_text("k")
        (tmp_path / name).chmod(mode)
    path = written(
        tmp_path,
        gateway="upstream: http://h:1\nupstream_key_file: engine",
        teams=(
            f"teams: {{a: {{{KEYS}}}}}\nupstreams:\n  u: {{url: 'http://h', key_file: open}}\n  v: {{url: 'http://h',"
            " key_file: closed}"
        ),
    )
    of_gateway, of_upstream = told(path)["warnings"]
    assert re.match(
        rf"{tmp_path}/gateway\.yaml, line 2: upstream_key_file: .*; chmod 600 {tmp_path}/engine$", of_gateway
    )
    assert re.match(
        rf"{tmp_path}/teams\.yaml, line 3: upstreams\.u\.key_file: .*; chmod 600 {tmp_path}/open$", of_upstream
    )


def test_slots_are_those_that_admission_gives():
    """The share of a band and its floor, as admission reckons them."""
    policy = load_policy(EXAMPLE)
    admission = Admission(policy)
    found = {row["band"]: row["most_slots"] for row in check.explain(policy)["bands"]}
    for name, team in admission._teams.items():
        assert team.band.most == found[policy.teams[name].band]
    assert 204 == found["experimental"]


def test_shares_add_up_to_one(tmp_path: Path):
    """Shares add up to one for every model and size of a prompt."""
    sums: dict[tuple[str, int], float] = {}
    for row in told(written(tmp_path, teams=TEAMS))["shares"]:
        where = row["model"], row["min_prompt_tokens"]
        sums[where] = sums.get(where, 0) + row["share"]
    assert {("big", 1): 1.0, ("big", 4001): 1.0, ("small", 1): 1.0, ("small", 4001): 1.0} == pytest.approx(sums)


def test_arms_of_one_variant_are_added(tmp_path: Path):
    text = "{url: 'http://h', weight: %s, variant: %s}"
    upstreams = "".join(
        f"\n  {name}: {text % more}"
        for name, more in (("a", (1, "stable")), ("b", (1, "canary")), ("c", (2, "stable")))
    )
    found = told(written(tmp_path, teams=f"teams: {{a: {{{KEYS}}}}}\nupstreams:{upstreams}"))["shares"]
    assert [("stable", 0.75, "a", 0.25), ("stable", 0.75, "c", 0.5), ("canary", 0.25, "b", 0.25)] == [
        (row["variant"], row["variant_share"], row["upstream"], row["share"]) for row in found
    ]


def test_shares_follow_that_of_the_canary(tmp_path: Path):
    """Also for a size of prompts that only the canary of share 0 takes, which it then gets."""
    found = told(written(tmp_path, teams=TEAMS + "canary: {share: 0.2}\n"))["shares"]
    (share,) = (row["variant_share"] for row in found if (row["model"], row["variant"]) == ("small", "canary"))
    assert 0.2 == pytest.approx(share, abs=0.01)  # c, which takes longer prompts, has a part of the rest
    found = told(written(tmp_path, teams=TEAMS.replace(", max_prompt_tokens: 4000}}\n  c", "}}\n  c") + "canary: {}\n"))
    assert 1.0 == pytest.approx(sum(row["share"] for row in found["shares"] if row["model"] == "small") / 2)


def test_the_policy_of_the_json_is_the_whole_policy(tmp_path: Path):
    """A field that is added to teams.yaml shows without anybody thinking of it."""
    found = told(written(tmp_path, teams=TEAMS + "canary: {share: 0.2}\n"))
    one = {"capacity": found["capacity"], "canary": found["canary"]} | {
        section: found[section][0] for section in ("bands", "teams", "models", "upstreams")
    }
    policy = load_policy(tmp_path / "teams.yaml")
    for section, row in one.items():
        part = getattr(policy, section)
        struct = part if section in ("capacity", "canary") else next(iter(part.values()))
        assert set() == set(struct.__struct_fields__) - row.keys()
    assert set(one) == set(Policy.__struct_fields__)


def test_a_terminal_gets_tables_with_the_same_cells(tmp_path: Path):
    path = written(tmp_path, teams=TEAMS.replace("sql", "'[sql]'"))
    console = Console(width=150, record=True, file=io.StringIO())
    commands.draw(check.check(path), console)
    text = console.export_text()
    for cell in ("│ [sql] ", "│ 12 (50 %) ", "│ 4001 and more ", "│ https://api.example.com ", "\nin order"):
        assert cell in text


def test_example_is_ok_and_help_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The example is in order and the help ends with a command that runs."""
    assert 0 == run(EXAMPLE).exit_code
    example = run("--help").stdout.split("Options:")[0].split()[-4:]
    assert ["vllm-watch", "gateway", "check", "teams.yaml"] == example
    written(tmp_path, teams=TEAMS)
    monkeypatch.chdir(tmp_path)
    assert run(*example[3:]).stdout.startswith("teams.yaml\n25 requests ")
