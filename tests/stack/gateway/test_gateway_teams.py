"""Teams, keys, what a reload changes, and the words for mistakes in the gateway's two files."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack.config import BadConfig, parse
from stack.gateway import GatewayConfig, make_key, run, runtime_policy
from stack.gateway.ids import request_id, trace
from stack.gateway.policy import BANDS, Capacity, Policy, Upstream
from stack.gateway.runtime_policy import RuntimePolicy, load_terms
from stack.gateway.teams import Teams, changes, hashed, load_policy, ranges, teams_of
from tests.support.wait import eventually

EXAMPLE = Path(__file__).parents[3] / "stack/deploy/teams.example.yaml"


def made(text: str, anonymous: str | None = None) -> Teams:
    return teams_of(parse(text, Policy, "teams.yaml"), "teams.yaml", anonymous)


def test_a_made_key_belongs_to_its_team():
    key, entry = make_key("demo")
    assert key.startswith("vw-demo-")
    assert hashed(key) == entry
    assert key != make_key("demo")[0]
    teams = made(f'teams: {{demo: {{keys: ["{entry}"]}}}}')
    assert ("demo", None, None) == (teams.of(key), teams.of(key + "x"), teams.of(None))


def test_a_team_may_have_an_old_and_a_new_key():
    teams = made(f'teams: {{demo: {{keys: ["{hashed("a")}", "{hashed("b")}"]}}, other: {{}}}}')
    assert ("demo", "demo", None) == (teams.of("a"), teams.of("b"), teams.of("other"))


def test_a_wrong_key_is_never_anonymous():
    teams = made("teams: {lab: {}}", anonymous="lab")
    assert ("lab", None, None) == (teams.of(None), teams.of("EMPTY"), teams.of(""))


@pytest.mark.parametrize(
    ("text", "anonymous", "fault"),
    [
        ("teams: {demo: {keys: [vw-demo-secret]}}", None, r"teams\.yaml: teams\.demo\.keys\[0\] .* key demo`.*sha256:"),
        ("teams: {Demo Team: {}}", None, "'Demo Team' .*no team name"),
        ("teams: {__unknown__: {}}", None, "'__unknown__' .*no team name"),
        (
            f"teams: {{a: {{keys: ['{hashed('x')}']}}, b: {{keys: ['{hashed('x')}']}}}}",
            None,
            r"teams\.b\.keys\[0\] .*\bteam a;",
        ),
        ("teams: {a: {}}", "b", r"anonymous_team: b .*\bteams\.yaml"),
        ("teams: {a: {kes: []}}", None, r"teams\.a\.kes .*\bkeys\?"),
        ("teems: {}", None, r"teems .*\bteams\?"),
    ],
)
def test_mistakes_in_teams_name_the_place(text: str, anonymous: str | None, fault: str):
    with pytest.raises(BadConfig) as caught:
        made(text, anonymous)
    assert re.search(fault, str(caught.value))
    assert "secret" not in str(caught.value)


# ---- the whole file


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "teams.yaml"
    path.write_text(text)
    return path


MISTAKES = {
    "band": ("teams:\n  a: {}\n  b:\n    band: dmo", 4, "teams.b.band: 'dmo' is no band; did you mean demo?"),
    "no default band": (
        "teams:\n  a: {}\nbands: {x: {rank: 0}, y: {rank: 1}}",
        2,
        "teams.a.band: 'default' is no band; choose from x, y",
    ),
    "weight": ("teams:\n  a:\n    weight: -0.5", 3, "teams.a.weight: -0.5 should be more than 0"),
    "no number": ("teams:\n  a:\n    weight: .nan", 3, "teams.a.weight: nan should be more than 0"),
    "endless": (
        "bands:\n  default: {rank: 0, max_wait_s: .inf}",
        2,
        "bands.default.max_wait_s: inf should be 0 or more",
    ),
    "limit": (
        "teams:\n  a:\n    max_running: 0",
        3,
        "teams.a.max_running: 0 should be more than 0; leave it out for no limit",
    ),
    "huge": (
        "teams:\n  a:\n    max_running: -1" + "0" * 400,
        3,
        "teams.a.max_running: -1" + "0" * 400 + " should be more than 0; leave it out for no limit",
    ),
    "prompt": (
        "teams:\n  a: {\n    max_prompt_tokens: -1}",
        3,
        "teams.a.max_prompt_tokens: -1 should be more than 0; leave it out for no limit",
    ),
    "ceiling 0": (
        "bands:\n  x:\n    rank: 0\n    ceiling: 0",
        4,
        "bands.x.ceiling: 0 should be more than 0 and at most 1",
    ),
    "ceiling 80": (
        "bands:\n  x:\n    rank: 0\n    ceiling: 80",
        4,
        "bands.x.ceiling: 80 should be more than 0 and at most 1",
    ),
    "floor": ("bands:\n  x:\n    rank: 0\n    floor: -1", 4, "bands.x.floor: -1 should be 0 or more"),
    "floors": (
        "bands: {x: {rank: 0, floor: 5}, y: {rank: 1, floor: 4}}\ncapacity:\n  slots: 8",
        3,
        "capacity.slots: 8 is less than the floors of all bands together (9); raise it or lower a floor",
    ),
    "timeout": ("bands:\n  x:\n    rank: 0\n    decode_s: 0", 4, "bands.x.decode_s: 0 should be more than 0"),
    "slots": ("capacity:\n  queue: 0\n  min_slots: 0", 3, "capacity.min_slots: 0 should be more than 0"),
    "cache": ("capacity:\n  kv_usage: 90", 2, "capacity.kv_usage: 90 should be more than 0 and at most 1"),
    "alias": (
        "models:\n  a: {}\n  b:\n    aliases:\n      - c\n      - a",
        6,
        "models.b.aliases[1]: 'a' is models.a already; a name leads to one model",
    ),
    "adapter": (
        "models:\n  a:\n    aliases: [x]\n  b:\n    adapters: [x]",
        5,
        "models.b.adapters[0]: 'x' is models.a.aliases[0] already; a name leads to one model",
    ),
    "team's model": (
        "teams:\n  a:\n    models: [sql, sqll]\nmodels:\n  qwen: {adapters: [sql]}",
        3,
        "teams.a.models[1]: 'sqll' is no model, alias or adapter; did you mean sql?",
    ),
    "length": (
        "models:\n  a/b-1.5:\n    max_model_len: 0\n  a/b-1: {}",
        3,
        "models.a/b-1.5.max_model_len: 0 should be more than 0; leave it out for no limit",
    ),
    "upstream": (
        "models:\n  a: {upstreams: [\n    gpu-O]}\nupstreams:\n  gpu-0: {url: 'http://h:1'}",
        3,
        "models.a.upstreams[0]: 'gpu-O' is no upstream; did you mean gpu-0?",
    ),
    "fallback": ("models:\n  a:\n    fallbacks: [b]", 3, "models.a.fallbacks[0]: 'b' is no upstream"),
    "twice": (
        "models:\n  a:\n    upstreams: [u, u]\nupstreams:\n  u: {url: 'http://h:1'}",
        3,
        "models.a.upstreams[1]: 'u' stands there twice",
    ),
    "none": (
        "models:\n  a:\n    upstreams: []",
        3,
        "models.a.upstreams: none would serve it; leave it out for every upstream of kind engine",
    ),
    "api": (
        (
            "models:\n  a:\n    upstreams: [u, v]\nupstreams:\n  u: {url: 'http://h:1'}\n  v: {url: 'http://h:2', kind:"
            " api}"
        ),
        3,
        "models.a.upstreams[1]: 'v' is of kind api, which is only ever a fallback; move it to fallbacks",
    ),
    "only api": (
        "teams: {}\nupstreams:\n  v: {url: 'http://h:2', kind: api}",
        2,
        "upstreams: none is of kind engine, and an api is only ever a fallback; add an engine",
    ),
    "url": (
        "upstreams:\n  u:\n    url: localhost:1",
        3,
        "upstreams.u.url: 'localhost:1' is no engine's address; write it like http://127.0.0.1:8001",
    ),
    "path": (
        "upstreams:\n  u:\n    url: http://h:1/v1",
        3,
        "upstreams.u.url: 'http://h:1/v1' is no engine's address; write it like http://127.0.0.1:8001",
    ),
    "port": (
        "upstreams:\n  u:\n    url: http://h:70000",
        3,
        "upstreams.u.url: 'http://h:70000' has no port from 0 to 65535",
    ),
    "password": (
        "upstreams:\n  u:\n    url: http://me:secret@h:1",
        3,
        "upstreams.u.url: 'h:1' has a user or a password before it; a key belongs into a file of its own",
    ),
    "upstream's weight": (
        "upstreams:\n  u:\n    url: http://h:1\n    weight: 0",
        4,
        "upstreams.u.weight: 0 should be more than 0",
    ),
    "range": (
        (
            "upstreams:\n  u: {url: 'http://h:1'}\n  v:\n    url: http://h:2\n    min_prompt_tokens: 9\n   "
            " max_prompt_tokens: 8"
        ),
        5,
        "upstreams.v.min_prompt_tokens: 9 is more than max_prompt_tokens (8)",
    ),
    "gap": (
        (
            "upstreams:\n  u: {url: 'http://h:1', max_prompt_tokens: 8000}\n  v: {url: 'http://h:2', min_prompt_tokens:"
            " 16000}"
        ),
        1,
        (
            "upstreams: no upstream takes prompts of 8001 to 15999 tokens; widen min_prompt_tokens or max_prompt_tokens"
            " of one"
        ),
    ),
    "gap at the end": (
        (
            "models:\n  a:\n    upstreams: [u]\nupstreams:\n  u: {url: 'http://h', max_prompt_tokens: 8000}\n  v: {url:"
            " 'http://h:2'}"
        ),
        3,
        (
            "models.a.upstreams: no upstream takes prompts of 8001 and more tokens; widen min_prompt_tokens or"
            " max_prompt_tokens of one"
        ),
    ),
    "unknown": ("teams:\n  a: {}\n  b:\n    bandd: demo", 4, "teams.b.bandd is unknown; did you mean band?"),
    "far": (
        "capacity:\n  zzz: 1",
        2,
        (
            "capacity.zzz is unknown; choose from slots, tokens, queue, queue_tokens, waiting, kv_usage, stale_s,"
            " min_slots"
        ),
    ),
    "missing": ("bands:\n  x: {rank: 1}\n  y: {}", 3, "bands.y.rank is missing"),
    "type": (
        "teams:\n  a: {max_running: 1}\n  b: {weight: 1,\n      max_running: many}",
        4,
        "teams.b.max_running: Expected `int | null`, got `str`",
    ),
    "choice": (
        "teams:\n  a: {}\n  b:\n    over_output: clmp",
        4,
        "teams.b.over_output: Invalid enum value 'clmp'; did you mean clamp?",
    ),
    "item": (
        "teams:\n  a:\n    keys: []\n    models:\n    - x\n    - 7",
        6,
        "teams.a.models[1]: Expected `str`, got `int`",
    ),
    "name": ("bands: {}\nmodels:\n  7: {}", 2, "models: YAML reads a name in it as `int`; put it in quotes"),
    "key": (
        "teams:\n  a:\n    keys:\n    - sha256:abc",
        4,
        "teams.a.keys[0] is no hash of a key; `vllm-watch gateway key a` makes a key and its sha256:... entry",
    ),
    "share of a canary": (
        "upstreams:\n  u: {url: 'http://h:1'}\n  v: {url: 'http://h:2', variant: canary}\ncanary:\n  share: 1.5",
        5,
        "canary.share: 1.5 should be from 0 to 1",
    ),
    "unknown variant": (
        "upstreams:\n  u: {url: 'http://h:1'}\n  v: {url: 'http://h:2', variant: canary}\ncanary:\n  variant: canry",
        5,
        "canary.variant: 'canry' is no variant of an engine among upstreams; did you mean canary?",
    ),
    "nothing but a canary": (
        "upstreams:\n  v: {url: 'http://h:2', variant: canary}\ncanary:\n  variant: canary",
        4,
        "canary.variant: every engine is of variant 'canary'; nothing is left to compare it with",
    ),
    "again": ("teams:\n  a: {}\n  b: {}\n  a: {weight: 2}", 4, "invalid YAML: duplicate key a, first in line 2"),
    "merged": (
        "teams:\n  a: &both\n    band: demo\n  b:\n    <<: *both\n    band: x",
        6,
        "teams.b.band: 'x' is no band; choose from demo, replay, default, experimental",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_policy_is_one_sentence_with_its_line(tmp_path: Path, mistake: str):
    text, line, sentence = MISTAKES[mistake]
    path = written(tmp_path, text)
    with pytest.raises(BadConfig) as caught:
        load_policy(path)
    assert f"{path}, line {line}: {sentence}" == str(caught.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "holds no key; write it on one line"),
        ("a\nb", "holds no key; write it on one line"),
        ("schlüssel", "cannot be read: it is no ASCII text"),
    ],
)
def test_unusable_key_file_is_reported_when_read(tmp_path: Path, content: str | None, why: str):
    """A key file that cannot be used is told when the file is read."""
    if content is not None:
        (tmp_path / "u.key").write_text(content)
    path = written(tmp_path, "upstreams:\n  u:\n    url: http://h:1\n    key_file: u.key\n")
    with pytest.raises(BadConfig) as caught:
        load_policy(path)
    assert f"{path}, line 4: upstreams.u.key_file: {tmp_path}/u.key {why}" == str(caught.value)


def test_a_key_file_lies_beside_the_file_that_names_it(tmp_path: Path):
    (tmp_path / "u.key").write_text("k\n")
    path = written(tmp_path, "upstreams:\n  u: {url: 'http://h:1', key_file: u.key}\n")
    assert f"{tmp_path}/u.key" == load_policy(path).upstreams["u"].key_file


@pytest.mark.parametrize(
    "text",
    [
        "teams: {%s: {}}",
        "teams: {a: {%s: }}",
        "teams: {a: {}}\nteams: {%s: []}",
        "teams: {%s: 1, %s: 2}",
        "teams: {a: {over_output: %s}}",
        "teams: {a: {keys: [%s]}}",
        "teams: {a: {band: %s}}",
    ],
)
def test_a_key_in_a_wrong_place_is_never_repeated(tmp_path: Path, text: str):
    key, _ = make_key("a-team_with-the-longest-name-40-letters-")
    with pytest.raises(BadConfig) as caught:
        load_policy(written(tmp_path, text.replace("%s", key)))
    assert key[-32:] not in str(caught.value)


def test_what_is_odd_but_clear_is_no_mistake(tmp_path: Path):
    """Nobody may wait, two arms of one name, a fallback that is an engine, gaps beyond what a model can take."""
    policy = load_policy(written(tmp_path, """
        capacity: {queue: 0, slots: 2}
        bands: {default: {rank: -1, max_wait_s: 0}}
        models: {m: {upstreams: [u, v], fallbacks: [w, u], max_model_len: 100}}
        upstreams:
          u: {url: "http://h:1", max_prompt_tokens: 50, variant: a}
          v: {url: "http://[::1]:2/", min_prompt_tokens: 51, max_prompt_tokens: 100, variant: a}
          w: {url: https://h}
    """))  # fmt: skip
    assert (0, ["w", "u"]) == (policy.capacity.queue, policy.models["m"].fallbacks)


def test_an_empty_file_is_the_shipped_policy(tmp_path: Path):
    assert Policy(bands=BANDS, capacity=Capacity(slots=256)) == load_policy(written(tmp_path, ""))


def test_the_example_says_everything_and_survives_a_round_trip(tmp_path: Path):
    """Every field of every struct stands in it, so that none is forgotten when one is added."""
    policy, text = load_policy(EXAMPLE), EXAMPLE.read_text()
    fields = {
        field
        for struct in (
            policy.capacity,
            policy.bands["demo"],
            policy.teams["chat"],
            policy.models["qwen-7b"],
            policy.upstreams["long"],
        )
        for field in struct.__struct_fields__
    }
    assert set() == {field for field in fields if f"{field}: " not in text}
    assert policy == load_policy(written(tmp_path, msgspec.yaml.encode(policy).decode()))
    assert {"demo", "replay", "default", "experimental"} == policy.bands.keys()
    times = {"prefill_s": None, "decode_s": None, "total_s": None}
    assert {name: msgspec.structs.replace(band, **times) for name, band in policy.bands.items()} == BANDS
    assert {"chat", "search", "night-jobs"} == policy.teams.keys()


LIMITS = st.one_of(st.none(), st.integers(0, 30))


@given(
    st.dictionaries(st.text("ab", max_size=3), st.tuples(LIMITS, LIMITS), max_size=4),
    st.one_of(st.none(), st.integers(1, 40)),
)
def test_every_prompt_size_falls_into_one_range(some: dict[str, Any], longest: int | None):
    """Every size of a prompt falls into one range with those that take it."""
    upstreams = {
        name: Upstream(url="http://h", min_prompt_tokens=low, max_prompt_tokens=high or None)
        for name, (low, high) in some.items()
    }
    found = list(ranges(upstreams, longest))
    for size in range(1, (longest or 50) + 1):
        takers = [n for n, u in upstreams.items() if (u.min_prompt_tokens or 0) <= size <= (u.max_prompt_tokens or 99)]
        assert ([takers] if upstreams else []) == [names for low, high, names in found if low <= size <= (high or 99)]


# ---- reload


def test_a_reload_tells_what_changed(tmp_path: Path):
    old = load_policy(EXAMPLE)
    text = EXAMPLE.read_text()
    for before, after in (
        ("night-jobs:", "batch:"), ("max_running: 48 ", "max_running: 64 "), ("slots: 256 ", "slots: 128 "),
        ("weight: 5 ", "weight: 10 "),
        ("over_output: clamp", "over_output: refuse"), ("aliases: [gpt-4o-mini]", "aliases: []"),
        ("max_in_flight: 96", "max_in_flight: null"),
        ('keys: ["', f'keys: ["{hashed("new")}", "'),
    ):  # fmt: skip
        assert before in text
        text = text.replace(before, after, 1)
    new = load_policy(written(tmp_path, text))
    assert [
        "teams.night-jobs is gone",
        "capacity.slots: 256 -> 128",
        "teams.chat.keys: 1 added",
        "teams.chat.max_running: 48 -> 64",
        "teams.chat.max_in_flight: 96 -> null",
        'teams.chat.over_output: "clamp" -> "refuse"',
        "teams.batch is new",
        'models.qwen-7b.aliases: ["gpt-4o-mini"] -> []',
        "upstreams.gpu-1.weight: 5.0 -> 10.0",
    ] == changes(old, new)
    assert [] == changes(old, load_policy(EXAMPLE))


WHOLE = "# 2\nteams:\n  a: {weight: 30}\n  b:\n    weight: 25\ncapacity:\n  slots: 100\n"


def terms(tmp_path: Path, text: str, former: RuntimePolicy | None = None) -> RuntimePolicy:
    written(tmp_path, text)
    (tmp_path / "gateway.secret").write_text("x" * 32)
    config = GatewayConfig(upstream="http://127.0.0.1:1", teams=str(tmp_path / "teams.yaml"))
    return load_terms(config, former=former)


@pytest.fixture
def quick_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_policy, "SETTLE_S", 0.0)


@pytest.mark.usefixtures("quick_reads")
def test_no_beginning_of_the_former_file_is_a_new_policy(tmp_path: Path):
    former = terms(tmp_path, WHOLE)
    for size in range(len(WHOLE)):
        with contextlib.suppress(BadConfig):
            assert former.policy == terms(tmp_path, WHOLE[:size], former).policy


@pytest.mark.usefixtures("quick_reads")
@pytest.mark.parametrize(
    ("text", "taken"),
    [
        (WHOLE, True),
        (WHOLE + "\n\n", True),
        ("# 1\nteams:\n  a: {weight: 30}\n", True),
        ("# 1\nteams:\n  a: {weight: 30}\n  b:\n    weight: 2", False),
        ("# 2\nteams:\n  a: {weight: 30}\n", False),
        ("teams: {}\n", False),
        ("\n# later\n", False),
    ],
)
def test_teams_go_by_an_edit_and_not_by_a_cut(tmp_path: Path, text: str, taken: bool):
    former = terms(tmp_path, WHOLE)
    with contextlib.nullcontext() if taken else pytest.raises(BadConfig, match=r"teams\.yaml"):
        terms(tmp_path, text, former)
    assert {} == terms(tmp_path, "").policy.teams, "a start takes what there is"


@pytest.mark.usefixtures("quick_reads")
@pytest.mark.parametrize(("reads", "text"), [(["", "te", "teams: {}", "teams: {}"], "teams: {}"), (None, None)])
def test_reload_waits_for_the_writer(monkeypatch: pytest.MonkeyPatch, reads: list[str] | None, text: str | None):
    endless = iter(reads or map(str, itertools.count()))
    monkeypatch.setattr(runtime_policy, "read_text", lambda path: next(endless))
    if text is None:
        with pytest.raises(BadConfig):
            runtime_policy.settled_text(Path("teams.yaml"))
    else:
        assert text == runtime_policy.settled_text(Path("teams.yaml"))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ([hashed("a")], [], "teams.t.keys: 1 removed"),
        ([hashed("a"), hashed("b")], [hashed("c"), hashed("d"), hashed("b")], "teams.t.keys: 2 added, 1 removed"),
        ([hashed("a"), hashed("b")], [hashed("b"), hashed("a")], "teams.t.keys: in another order"),
    ],
)
def test_keys_are_counted_and_not_shown(old: list[str], new: list[str], told: str):
    assert [told] == changes(*(msgspec.convert({"teams": {"t": {"keys": keys}}}, Policy) for keys in (old, new)))


# ---- gateway.yaml


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("upstream: localhost", r"upstream 'localhost' .*\bhttp://127\.0\.0\.1:8001$"),
        ("upstream: http://h:1/v1", r"upstream 'http://h:1/v1' .*\bhttp://127\.0\.0\.1:8001$"),
        ("{upstream: 'http://h:1', listen: ':8000'}", "':8000' .*no address; .*127.0.0.1:9401"),
        ("{upstream: 'http://h:1', limits: {body_byte: 1}}", r"limits\.body_byte .*\bbody_bytes\?"),
        ("{upstream: 'http://h:1', timeouts: {drain_s: 0}}", r"gateway\.yaml: timeouts\.drain_s .*more than 0, not 0"),
        (
            "upstream: http://h:1\nlimits:\n  log_bytes: 0",
            r"gateway\.yaml, line 3: limits\.log_bytes .*more than 0, not 0",
        ),
        ("listen: 127.0.0.1:1\nupstream: localhost", r"gateway\.yaml, line 2: upstream 'localhost' "),
        ("upstream: http://me:secret@h:1", r"gateway\.yaml: upstream 'h:1' .*a password"),
    ],
)
def test_mistakes_in_the_configuration_name_the_place(text: str, fault: str):
    with pytest.raises(BadConfig) as caught:
        parse(text, GatewayConfig, "gateway.yaml")
    assert re.search(fault, str(caught.value))


def test_a_missing_teams_file_is_one_sentence_and_exit_code_1(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "gateway.yaml").write_text(
        "upstream: http://127.0.0.1:9\nlisten: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\n"
    )
    with caplog.at_level(logging.ERROR):
        assert 1 == run(tmp_path / "gateway.yaml")
    (record,) = caplog.records
    assert re.match(rf"{tmp_path}/teams\.yaml .*: No such file", record.getMessage())


def test_the_process_serves_reopens_its_log_and_stops_on_sigterm(tmp_path: Path, free_port: Callable[[], int]):
    """Paths are taken from the configuration file's folder; no engine is needed to start."""
    listen, port = f"127.0.0.1:{free_port()}", free_port()
    (tmp_path / "teams.yaml").write_text("teams: {demo: {}}")
    (tmp_path / "gateway.yaml").write_text(
        f"upstream: http://127.0.0.1:{port}\nlisten: {listen}\nmetrics_listen: 127.0.0.1:{free_port()}\n"
    )
    code = "import sys, pathlib; from stack.gateway import run; sys.exit(run(pathlib.Path(sys.argv[1])))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "gateway.yaml")], cwd=Path(__file__).parents[3]
    )
    try:
        eventually(lambda: urllib.request.urlopen(f"http://{listen}/-/healthy", timeout=1).read() == b"ok\n")
        log = tmp_path / "requests.jsonl"
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://{listen}/v1/chat/completions", data=b"{}", timeout=30)
        eventually(lambda: log.read_bytes().count(b"no_key") == 1)
        log.rename(tmp_path / "old")
        os.kill(process.pid, signal.SIGHUP)
        eventually(log.exists)
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(10)
    finally:
        process.kill()
        process.wait()


def test_ids_that_could_break_a_log_or_a_header_are_replaced():
    def fake_hex(size: int) -> str:
        return "f" * 2 * size

    assert "a-1/b" == request_id("a-1/b", fake_hex)
    for bad in (None, "", "a b", "é", "x" * 129, "a\tb", "a\n"):
        assert "f" * 32 == request_id(bad, fake_hex)


@pytest.mark.parametrize(
    ("sent", "continued"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", True),
        ("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what-comes-later", True),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-extra", False),
        ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", False),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", False),
        ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        ("", False),
        (None, False),
    ],
)
def test_a_trace_is_continued_only_from_a_valid_parent(sent: str | None, continued: bool):
    span = trace(sent, lambda size: "a" * 2 * size)
    assert (continued, "a" * 16) == (span.continued, span.span_id)
    assert ("b7ad6b7169203331" if continued else None, not (sent or "").endswith("-00")) == (
        span.parent_id,
        span.sampled,
    )
    assert span.trace_id == ("0af7651916cd43dd8448eb211c80319c" if continued else "a" * 32)
    assert span.flags == (sent.split("-")[3] if continued and sent else "01")


def test_without_an_engine_in_either_file_nothing_starts(tmp_path: Path):
    written(tmp_path, "teams: {a: {}}\n")
    with pytest.raises(BadConfig, match=rf"upstream: .*{tmp_path}/teams\.yaml .*`upstream: http://HOST:PORT`"):
        load_terms(GatewayConfig(teams=str(tmp_path / "teams.yaml")))
