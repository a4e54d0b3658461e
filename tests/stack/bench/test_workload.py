"""Workloads: what a file may say, how its mistakes are told, and that a plan is what was asked for."""

from __future__ import annotations

import collections
import itertools
import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as some

from exporters.requests.record import RequestRecord, timestamp, to_line
from stack.bench import workload as w
from stack.bench import workload_file, workload_fit, workload_lengths, workload_plan
from stack.cli.bench import chosen
from stack.config import BadConfig, source

LAB10 = """\
workloads:
  - name: "short-short"
    input_tokens: 128
    output_tokens: 64
    concurrency: [1, 4, 8, 16]
  - name: "long-short"
    input_tokens: 4096
    output_tokens: 64
    concurrency: [1, 4, 8]
metrics:
  - ttft_ms
  - tpot_ms
  - qps
  - tokens_per_second
  - memory_peak_gb
"""
COPIED = "\n".join(line.strip() for line in LAB10.splitlines())  # as it arrives when it is copied from the lab's page
C4 = w.LoadLevel("c4", concurrency=4)


def loaded(text: str, folder: Path) -> w.WorkloadFile:
    path = folder / "own.yaml"
    path.write_text(text)
    return workload_file.load(path)


def one(**said) -> w.Workload:
    return w.Workload(**{"name": "one", "input_tokens": 100, "output_tokens": 10, "concurrency": 4, **said})


# ---- files


def shared_ratio(asks: Iterable[workload_plan.PlannedRequest]) -> float:
    """The part of all prompt tokens that a boundless cache could hold, had each request ended before the next began:
    what a hit ratio can reach."""
    seen: set[tuple[str, ...]] = set()
    found = total = 0
    for ask in asks:
        keys = tuple(segment.key for segment in ask.segments)
        for end, segment in enumerate(ask.segments, 1):
            total += segment.tokens
            found += segment.tokens if keys[:end] in seen else 0
            seen.add(keys[:end])
    return found / total if total else 0.0


@pytest.mark.parametrize("text", [LAB10, COPIED], ids=["as its file", "as copied from its page"])
def test_lab_10_is_read_as_it_is(text, tmp_path):
    suite = loaded(text, tmp_path)
    assert [("short-short", 128, 64), ("long-short", 4096, 64)] == [
        (one.name, one.input_tokens, one.output_tokens) for one in suite.workloads
    ]
    assert [["c1", "c4", "c8", "c16"], ["c1", "c4", "c8"]] == [
        [point.label for point in w.points(one)] for one in suite.workloads
    ]
    assert ("ttft_ms", "tpot_ms", "qps", "tokens_per_second", "memory_peak_gb") == suite.metrics


def test_lab_10_and_what_is_shipped_ask_the_same(tmp_path):
    ours = [*workload_file.load("short-short").workloads, *workload_file.load("long-short").workloads]
    assert w.hash_of(loaded(LAB10, tmp_path).workloads) == w.hash_of(ours)


def test_a_plan_of_lab_10_has_its_lengths(tmp_path):
    for workload in loaded(LAB10, tmp_path).workloads:
        for point in w.points(workload):
            asks = workload_plan.plan(workload, point, seed=1, run=1)
            assert max(20, 4 * point.concurrency) == len(asks)
            assert {(workload.input_tokens, workload.output_tokens)} == {
                (ask.prompt_tokens, ask.output_tokens) for ask in asks
            }


def test_what_is_shipped():
    assert {
        "short-short", "long-short", "shared-prefix", "head-of-line", "support-chat", "compliance-summaries",
        "coding-qa", "same-codebase", "rag",
        "agent-loop", "json-output", "mixed-burst",
    } == set(workload_file.included())  # fmt: skip


@pytest.mark.parametrize("name", workload_file.included())
def test_default_workloads_fit_32k_and_name_sources(name):
    """What is the default fits a context of 32k and names its source."""
    suite, text = workload_file.load(name), workload_file.included()[name].read_text()
    assert name == suite.workloads[0].name or name == "json-output"
    assert text.startswith("# ")
    assert any(source in text for source in ("Lab 10", "Week 11", "explanation of vLLM"))
    assert suite.metrics
    for workload in suite.workloads:
        assert workload.about
        assert workload == workload_fit.fitting(workload, 32768)
        for point in w.points(workload):
            assert (
                max(ask.prompt_tokens + ask.output_tokens for ask in workload_plan.plan(workload, point, seed=1, run=1))
                <= 32768
            )


@pytest.mark.parametrize("name", workload_file.included())
@pytest.mark.parametrize("context", [512, 2048, 8192])
def test_default_workloads_fit_small_contexts_scaled(name, context):
    """What is the default fits a small context at the scale that is named."""
    for workload in workload_file.load(name).workloads:
        try:
            workload_fit.fitting(workload, context)
        except BadConfig as error:
            scale = float(str(error).split("--scale ")[1].split()[0])
            small = workload_fit.fitting(workload, context, scale)
            for point in w.points(small):
                assert (
                    max(
                        ask.prompt_tokens + ask.output_tokens for ask in workload_plan.plan(small, point, seed=1, run=1)
                    )
                    <= context
                )


@pytest.mark.parametrize(
    "name", [name for name in workload_file.included() if workload_file.load(name).workloads[0].expected_hit]
)
def test_default_workloads_can_reach_their_hit_ratio(name):
    """A cache that holds everything finds as much as the scenario promises: the numbers of the file and the band belong
    together."""
    workload = workload_file.load(name).workloads[0]
    low, high = workload.expected_hit
    assert workload.scenario
    for point, seed in itertools.product(w.points(workload), range(5)):
        assert low <= shared_ratio(workload_plan.plan(workload, point, seed, run=1)) <= high


# ---- mistakes

OK = {"name": "a", "input_tokens": 100, "output_tokens": 10, "concurrency": 4}
# What is wrong, and a pattern of the field and the values that the message names.
MISTAKES = [
    ({"input_token": 5}, r"input_token .*\binput_tokens\?"),
    ({"input_tokens": "many"}, r"input_tokens: .*p50, p95.*min, max.*choices.*`str`"),
    ({"input_tokens": 0}, "input_tokens: 0 .*1 to 100,000,000"),
    ({"output_tokens": None}, "output_tokens is missing"),
    ({"input_tokens": {"pp50": 3}}, r"input_tokens\.pp50 .*\bp50\?"),
    ({"input_tokens": {"p50": 3}}, "input_tokens: p50 .*p95.*min.*max.*choices"),
    ({"input_tokens": {"min": 9, "max": 3}}, r"input_tokens\.min: 9 .*max \(3\)"),
    ({"input_tokens": {"p50": 9, "p95": 3}}, r"input_tokens\.p50: 9 .*p95 \(3\)"),
    ({"input_tokens": {"choices": [5, -1]}}, r"input_tokens\.choices\[1\]: -1 .*1 to 100,000,000"),
    ({"input_tokens": {"choices": []}}, "input_tokens: nothing .*p95.*min.*max.*choices"),
    ({"concurrency": None}, ".*no load; .*concurrency, rate, burst or replay"),
    ({"concurrency": []}, "concurrency: .*is empty"),
    ({"concurrency": [1, 0]}, r"concurrency\[1\]: 0 .*more than 0"),
    ({"concurrency": [4, 4]}, ".*load c4 .*twice"),
    ({"rate": float("inf")}, "rate: inf .*more than 0"),
    ({"rate": 1e6}, r".*load r1e\+06 .*20,000,000 requests.* 1,000,000 "),
    ({"arrival": "poison"}, r"arrival: .*'poison'.*\bpoisson\?"),
    ({"arrival": "poisson"}, "concurrency: .*closed, .*poisson"),
    ({"burstiness": 0.5}, "burstiness: .*no rate"),
    ({"burst": {"every_s": 5}}, r"burst\.size is missing"),
    ({"burst": {"size": [4, 0]}}, r"burst\.size\[1\]: 0 .*more than 0"),
    ({"replay": {"log": "x"}}, "input_tokens: .*replay"),
    ({"turns": 1001, "turn_tokens": 1}, "turns: 1001 .*1 to 1,000"),
    ({"turns": 3}, "turn_tokens is missing.* 3 turns"),
    ({"turn_tokens": 3}, "turn_tokens: .*one turn"),
    ({"turns": 3, "turn_tokens": 5, "requests": 20}, r"requests: 20 .*\(3\).* 21 "),
    ({"turns": 3, "turn_tokens": 5, "max_input_tokens": 120}, "max_input_tokens: 3 turns.* 130 tokens.* 120;"),
    ({"shared_prefix_tokens": 100}, r"shared_prefix_tokens: 100 .*\(100\).*\binput_tokens"),
    ({"prefix_groups": 2}, "prefix_groups: .*shared_prefix_tokens"),
    ({"cache": "warm"}, "cache: .*warm.*shared_prefix_tokens"),
    ({"cache": "hot"}, "cache: .*'hot'.*as_is, cold, warm"),
    ({"classes": {"a b": {"share": 1}}}, "classes.a b: 'a b' .*1 to 60"),
    ({"classes": {"long": {"share": 0}}}, r"classes\.long\.share: 0 .*more than 0"),
    ({"classes": {"long": {"share": 1}}, "input_tokens": None}, r"classes\.long\.input_tokens is missing"),
    ({"slo": {"ttft": 5}}, r"slo\.ttft .*\bttft_ms\?"),
    ({"slo": {"ttft_ms": 0}}, r"slo\.ttft_ms: 0 .*more than 0"),
    ({"expected_hit": [0.6, 0.3]}, r"expected_hit: .*\[0\.3, 0\.6\]"),
    ({"expected_hit": [30, 60]}, r"expected_hit\[0\]: 30 .*0 and 1"),
    ({"json": {"schema": {}}}, "endpoint: json .*chat"),
    ({"json": {"schema": {}}, "endpoint": "chat"}, "ignore_eos: json .*false"),
]


@pytest.mark.parametrize(
    ("wrong", "fault"), MISTAKES, ids=[next(iter(wrong)) + f"-{at}" for at, (wrong, _) in enumerate(MISTAKES)]
)
def test_a_mistake_is_one_sentence_that_names_its_place(wrong, fault, tmp_path):
    said = {key: value for key, value in {**OK, **wrong}.items() if value is not None}
    place = re.escape(f"{tmp_path}/own.yaml, line ")
    with pytest.raises(BadConfig, match=rf"^{place}\d+: workloads\.a[.:] ?{fault}.*$"):
        loaded(yaml.safe_dump({"workloads": [said]}, sort_keys=False), tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "own.yaml: .*is empty.*`workloads:`"),
        ("workloads: []\n#\n", "own.yaml, line 1: workloads: .*name, input_tokens, output_tokens and concurrency"),
        ("workload: []\n#\n", r"own.yaml, line 1: workload .*\bworkloads\?"),
        (LAB10 + "  - ttft\n", r"own.yaml, line 16: metrics\[5\]: 'ttft' .*\bttft_ms\?"),
        (LAB10 + "  - zzz\n", rf"own.yaml, line 16: metrics\[5\]: 'zzz' .*{', '.join(w.METRICS)}"),
        (
            LAB10.replace("long-short", "short-short"),
            r"own.yaml, line 6: workloads\.short-short\.name: short-short .*twice",
        ),
        (LAB10.replace("long-short", "a/b"), r"own.yaml, line 6: workloads\.a/b\.name: 'a/b' .*1 to 60"),
        ("workloads: [\n", "own.yaml, line 2: .*YAML.*<stream end>"),
        (
            LAB10.replace("tokens: 4096", "tokens: -1"),
            r"own.yaml, line 7: workloads\.long-short\.input_tokens: -1 .*1 to 100,000,000",
        ),
    ],
)
def test_a_mistake_of_the_file_is_one_sentence(text, fault, tmp_path):
    with pytest.raises(BadConfig, match=rf"^{re.escape(str(tmp_path))}/{fault}.*$"):
        loaded(text, tmp_path)


def test_a_name_that_is_none_leads_to_the_nearest(tmp_path):
    with pytest.raises(BadConfig, match=r"^short-shrt .*\bshort-short\?"):
        workload_file.load("short-shrt")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(BadConfig, match=r"bytes .*UTF-8"):
        workload_file.load(tmp_path / "bytes")


def test_what_is_said_comes_back_whole():
    said = w.resolved(one(slo=w.Slo(ttft_ms=2000.0), rate=2))
    assert ("one", 100, 10, 4, 2, 6, "fresh", "cold", 1.0) == tuple(
        said[key]
        for key in (
            "name",
            "input_tokens",
            "output_tokens",
            "concurrency",
            "rate",
            "runs",
            "seed",
            "cache",
            "burstiness",
        )
    )
    assert "about" not in said
    assert "burst" not in said


def test_the_hash_is_of_what_is_asked_and_not_of_words_about_it():
    plain = w.hash_of([one()])
    assert plain == w.hash_of([one(about="words", runs=9, expected_hit=(0.1, 0.2), scenario="words")])
    assert 12 == len(plain)
    others = [
        one(input_tokens=101),
        one(slo=w.Slo(e2e_ms=1.0)),
        one(temperature=0.7),
        one(cache="as_is"),
        one(name="two"),
    ]
    assert 6 == len({plain, *(w.hash_of([other]) for other in others)})


anything = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(-2, 50),
    some.integers(10**7, 10**30),
    some.floats(),
    some.sampled_from(["", "x", "closed", "poisson", "fixed", "warm", "chat"]),
    some.lists(some.integers(-1, 9), max_size=3),
    some.dictionaries(
        some.sampled_from(["min", "max", "p50", "p95", "share", "size", "schema"]), some.integers(-1, 10**9), max_size=3
    ),
)


@settings(max_examples=120, deadline=None)
@given(some.dictionaries(some.sampled_from(w.Workload.__struct_fields__), anything, max_size=4))
def test_whatever_a_file_says_it_is_planned_or_refused(said):
    try:
        (workload,) = workload_file.understood(source(yaml.safe_dump({"workloads": [OK | said]}), "own.yaml")).workloads
    except BadConfig as refused:
        sentence = str(refused)
    else:
        sentence = None
    if sentence is not None:
        assert sentence.startswith("own.yaml")
        assert "\n" not in sentence
        return
    for point in w.points(workload):
        asks = workload_plan.plan(workload, point, 1, 1)
        assert w.requests_of(workload, point) == len(asks)
        assert all(segment.tokens >= 1 for ask in asks for segment in ask.segments)
        assert w.expected_seconds(workload, point, 1.0, 0.1) > 0
    assert w.hash_of([workload])


# ---- the context


def test_too_large_workload_names_the_scale():
    """What the context cannot hold is refused with the scale that fits."""
    with pytest.raises(BadConfig, match=r"head-of-line, class long: 20,000 .*\b256 .*\b8,192; --scale 0\.4 "):
        workload_fit.fitting(workload_file.load("head-of-line").workloads[0], 8192)


def test_a_chat_keeps_room_for_its_template():
    assert one() == workload_fit.fitting(one(), 110)
    with pytest.raises(BadConfig, match=r"\b64 .*chat.*\b173\b"):
        workload_fit.fitting(one(endpoint="chat"), 173)
    assert workload_fit.fitting(one(endpoint="chat"), 174)


def test_no_scale_helps_where_there_are_too_many_turns():
    with pytest.raises(BadConfig, match=r"\b64; no scale .*--max-model-len"):
        workload_fit.fitting(one(turns=50, turn_tokens=10), 64)


@pytest.mark.parametrize("scale", [0, -1, math.inf, math.nan])
def test_a_scale_is_more_than_nothing(scale):
    with pytest.raises(BadConfig, match=rf"^--scale: {scale:g} .*more than 0$"):
        workload_fit.fitting(one(), 1000, scale)


def test_a_scale_that_is_too_large_is_refused_with_one_that_fits():
    with pytest.raises(BadConfig, match=r": 200 .*\b20 .*\b150; --scale 1\.3 "):
        workload_fit.fitting(one(), 150, 2.0)


def test_scale_multiplies_lengths_to_at_least_one():
    """A scale multiplies every length and leaves at least one token."""
    before = one(
        input_tokens=workload_lengths.Length(min=100, max=300),
        output_tokens=workload_lengths.Length(p50=40, p95=80),
        shared_prefix_tokens=50,
        turns=2,
        turn_tokens=workload_lengths.Length(choices=(1, 20)),
        max_input_tokens=500,
        max_output_tokens=70,
        classes={"x": w.RequestClass(share=1, input_tokens=200)},
    )
    after = workload_fit.scaled(before, 0.1)
    assert (workload_lengths.Length(min=10, max=30), workload_lengths.Length(p50=4, p95=8), 5) == (
        after.input_tokens,
        after.output_tokens,
        after.shared_prefix_tokens,
    )
    assert (workload_lengths.Length(choices=(1, 2)), 50, 7, 20) == (
        after.turn_tokens,
        after.max_input_tokens,
        after.max_output_tokens,
        after.classes["x"].input_tokens,
    )
    assert before.slo == after.slo
    tiny = workload_plan.plan(workload_fit.scaled(before, 1e-9), C4, 1, 1)
    assert {1} == {segment.tokens for ask in tiny for segment in ask.segments}


# ---- plans

lengths = some.one_of(
    some.integers(1, 5000),
    some.tuples(some.integers(1, 2000), some.integers(0, 2000)).map(
        lambda t: workload_lengths.Length(min=t[0], max=t[0] + t[1])
    ),
    some.tuples(some.integers(1, 2000), some.integers(0, 2000)).map(
        lambda t: workload_lengths.Length(p50=t[0], p95=t[0] + t[1])
    ),
    some.lists(some.integers(1, 5000), min_size=1, max_size=5).map(
        lambda values: workload_lengths.Length(choices=tuple(values))
    ),
)
plain = some.builds(
    lambda i, o, n, c, seed_policy: one(input_tokens=i, output_tokens=o, requests=n, concurrency=c, seed=seed_policy),
    lengths, lengths, some.integers(1, 60), some.integers(1, 16), some.sampled_from(["fresh", "fixed"]),
)  # fmt: skip


def shape(asks):
    """A plan without its keys."""
    return [
        (ask.number, ask.kind, tuple(s.tokens for s in ask.segments), ask.output_tokens, ask.due_s, ask.after)
        for ask in asks
    ]


@settings(max_examples=60, deadline=None)
@given(plain, some.integers(0, 2**63), some.integers(1, 10**6))
def test_plan_follows_from_its_seed(workload, seed, run):
    """A plan follows from its seed and its lengths stay within."""
    point = w.points(workload)[0]
    asks = workload_plan.plan(workload, point, seed, run)
    assert asks == workload_plan.plan(workload, point, seed, run)
    assert workload.requests == len(asks)
    assert list(range(len(asks))) == [ask.number for ask in asks]
    for length, drawn in (
        (workload.input_tokens, [a.prompt_tokens for a in asks]),
        (workload.output_tokens, [a.output_tokens for a in asks]),
    ):
        if isinstance(length, int):
            assert {length} == set(drawn)
        elif length.choices:
            assert set(drawn) <= set(length.choices)
        else:
            low, high = workload_lengths.length_ends(length)
            assert low <= min(drawn) <= max(drawn) <= high
    other = workload_plan.plan(workload, point, seed, run + 1)
    assert shape(asks) == shape(other), "two variants can be given the same work"
    keys = [segment.key for ask in asks for segment in ask.segments]
    assert len(keys) == len(set(keys))
    shared = set(keys) & {segment.key for ask in other for segment in ask.segments}
    assert (set(keys) if workload.seed == "fixed" else set()) == shared


def test_another_seed_is_another_plan_of_nearly_the_same_work():
    """Lengths come one from each part of their distribution, so runs differ little in what they ask for."""
    workload = one(input_tokens=workload_lengths.Length(p50=500, p95=2000), requests=100)
    plans = [workload_plan.plan(workload, C4, seed, 1) for seed in range(20)]
    totals = [sum(ask.prompt_tokens for ask in asks) for asks in plans]
    assert 20 == len({tuple(ask.prompt_tokens for ask in asks) for asks in plans})
    assert statistics.stdev(totals) / statistics.fmean(totals) < 0.03, "independent draws would differ by 10 %"


def test_a_distribution_has_its_percentiles():
    workload = one(
        input_tokens=workload_lengths.Length(p50=500, p95=2000),
        output_tokens=workload_lengths.Length(min=50, max=200),
        requests=1000,
    )
    asks = workload_plan.plan(workload, C4, 1, 1)
    inputs, outputs = sorted(ask.prompt_tokens for ask in asks), sorted(ask.output_tokens for ask in asks)
    assert inputs[500] == pytest.approx(500, rel=0.02)
    assert inputs[950] == pytest.approx(2000, rel=0.02)
    assert inputs[-1] <= 8000
    assert (50, 200) == (outputs[0], outputs[-1])
    assert statistics.fmean(outputs) == pytest.approx(125, rel=0.01)


def test_caps_cut_what_is_longer():
    workload = one(
        input_tokens=workload_lengths.Length(p50=500, p95=2000),
        output_tokens=300,
        max_input_tokens=1000,
        max_output_tokens=200,
        requests=200,
    )
    asks = workload_plan.plan(workload, C4, 1, 1)
    assert (1000, 200) == (max(ask.prompt_tokens for ask in asks), max(ask.output_tokens for ask in asks))
    assert workload == workload_fit.fitting(workload, 1200)


@settings(max_examples=40, deadline=None)
@given(some.integers(1, 5), some.integers(1, 40), some.integers(0, 99), some.sampled_from(["cold", "warm", "as_is"]))
def test_shared_prefix_is_one_key_per_group(groups, requests, seed, cache):
    """A shared prefix is one key for each group and the rest is nobody else's."""
    workload = one(shared_prefix_tokens=60, prefix_groups=groups, requests=requests, cache=cache)
    asks, other = workload_plan.plan(workload, C4, seed, 1), workload_plan.plan(workload, C4, seed, 2)
    counted = collections.Counter(ask.segments[0] for ask in asks)
    assert min(groups, requests) == len(counted)
    assert max(counted.values()) - min(counted.values()) <= 1, "groups are as large as each other"
    assert all([60, 40] == [segment.tokens for segment in ask.segments] for ask in asks)
    assert requests == len({ask.segments[1].key for ask in asks})
    before, after = ({ask.segments[0].key for ask in plan} for plan in (asks, other))
    if cache == "warm":
        assert before == after
        assert all(key.startswith("bench:") for key in before)
    else:
        assert not before & after
        assert all(key.startswith("run:") for key in before)
    assert not {ask.segments[1].key for ask in asks} & {ask.segments[1].key for ask in other}


def test_workloads_and_loads_never_share_what_they_repeat():
    """A key is the same tokens: two meanings of one key would let one load warm another."""
    loads = [
        (one(name=f"{name}-{cache}", seed="fixed", cache=cache, shared_prefix_tokens=50), point)
        for name, cache, point in itertools.product("ab", ("cold", "warm"), (C4, w.LoadLevel("c8", concurrency=8)))
    ]
    keys = {
        (workload.name, point.label): {s.key for ask in workload_plan.plan(workload, point, 1, 1) for s in ask.segments}
        for workload, point in loads
    }  # fmt: skip
    for (load, its), (other, others) in itertools.combinations(keys.items(), 2):
        same = {f"bench:{load[0]}:prefix:0"} if load[0] == other[0] and load[0].endswith("warm") else set()
        assert same == its & others


def test_a_warm_up_has_keys_of_its_own():
    for policy in ("fresh", "fixed"):
        workload = one(seed=policy)
        warm_up, run = (
            {s.key for ask in workload_plan.plan(workload, C4, 1, number) for s in ask.segments} for number in (-1, 1)
        )
        assert not warm_up & run


def test_classes_have_shares_and_own_settings():
    """Classes come in their shares and share only what they do not give themselves."""
    workload = one(
        shared_prefix_tokens=20,
        requests=40,
        classes={
            "short": w.RequestClass(share=7),
            "long": w.RequestClass(share=1, input_tokens=900, output_tokens=5),
            "own": w.RequestClass(share=2, shared_prefix_tokens=30),
        },
    )
    asks = workload_plan.plan(workload, C4, 3, 1)
    assert {"short": 28, "long": 4, "own": 8} == collections.Counter(ask.kind for ask in asks)
    assert {("short", 100, 10), ("long", 900, 5), ("own", 100, 10)} == {
        (ask.kind, ask.prompt_tokens, ask.output_tokens) for ask in asks
    }
    prefixes = {kind: {ask.segments[0] for ask in asks if ask.kind == kind} for kind in ("short", "long", "own")}
    assert prefixes["short"] == prefixes["long"] != prefixes["own"]
    assert [ask.kind for ask in asks] != sorted((ask.kind for ask in asks), key=str), "they come mixed"


@settings(max_examples=40, deadline=None)
@given(some.integers(2, 5), some.integers(1, 8), some.integers(1, 10), some.integers(0, 99), some.booleans())
def test_turn_holds_the_history_and_waits(turns, talks, at_once, seed, open_loop):
    """Each turn is the whole history and waits for the one before."""
    point = w.LoadLevel("r2", rate_per_s=2.0) if open_loop else w.LoadLevel("c", concurrency=at_once)
    workload = one(
        turns=turns,
        turn_tokens=workload_lengths.Length(min=5, max=50),
        requests=turns * talks,
        shared_prefix_tokens=60,
        rate=2.0,
    )
    asks = workload_plan.plan(workload, point, seed, 1)
    assert turns * talks == len(asks)
    for before, ask in itertools.pairwise(asks):
        if ask.number % turns:
            assert before.segments == ask.segments[:-2]
            answer, added = ask.segments[-2:]
            assert before.output_tokens == answer.tokens
            assert answer.key.endswith(":answer")
            assert 5 <= added.tokens <= 50
            assert (before.number, None) == (ask.after, ask.due_s)
    firsts = asks[::turns]
    if open_loop:
        assert all(ask.after is None and ask.due_s is not None for ask in firsts)
        assert turns * talks / 2.0 == pytest.approx(firsts[-1].due_s)
    else:
        assert [None if talk < at_once else (talk - at_once + 1) * turns - 1 for talk in range(talks)] == [
            ask.after for ask in firsts
        ]
    keys = [segment.key for ask in firsts for segment in ask.segments[1:]]
    assert len(keys) == len(set(keys))


# ---- arrivals


@settings(max_examples=60, deadline=None)
@given(some.integers(1, 200), some.floats(0.05, 500), some.floats(0.05, 20), some.integers(0, 2**32))
def test_arrivals_are_sorted_at_the_given_rate(requests, rate, burstiness, seed):
    """Arrivals are sorted and have the rate that was asked for."""
    workload = one(requests=requests, rate=rate, burstiness=burstiness)
    due = [ask.due_s for ask in workload_plan.plan(workload, w.LoadLevel("r", rate_per_s=rate), seed, 1)]
    assert due == sorted(due)  # type: ignore[type-var]
    assert due[0] >= 0
    assert requests / rate == pytest.approx(due[-1])


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)])
def test_burstiness_is_how_uneven_gaps_are(burstiness, spread):
    """Of a gamma distribution of shape k, the standard deviation is 1/sqrt(k) of the mean."""
    workload = one(requests=4000, rate=10.0, burstiness=burstiness)
    gaps = [
        b - a
        for a, b in itertools.pairwise(
            ask.due_s for ask in workload_plan.plan(workload, w.LoadLevel("r10", rate_per_s=10.0), 5, 1)
        )
    ]
    assert spread == pytest.approx(statistics.stdev(gaps) / statistics.fmean(gaps), rel=0.1)


def test_bursts_come_all_at_once():
    workload = one(concurrency=None, burst=w.Burst(size=(4, 8), every_s=2.5), requests=10)
    assert [w.LoadLevel("b4", burst=4), w.LoadLevel("b8", burst=8)] == list(w.points(workload))
    assert [0.0] * 4 + [2.5] * 4 + [5.0] * 2 == [
        ask.due_s for ask in workload_plan.plan(workload, w.points(workload)[0], 1, 1)
    ]


def test_a_closed_loop_has_no_times():
    assert {(None, None)} == {(ask.due_s, ask.after) for ask in workload_plan.plan(one(), C4, 1, 1)}


def test_loads_of_several_kinds_stand_beside_each_other():
    workload = one(concurrency=(1, 8), rate=(0.5, 2), burst=w.Burst(size=16))
    assert ["c1", "c8", "r0.5", "r2", "b16"] == [point.label for point in w.points(workload)]
    assert [20, 32, 20, 40, 48] == [w.requests_of(workload, point) for point in w.points(workload)]


def test_json_workload_enforces_or_asks_for_a_schema():
    """A JSON workload holds the engine to its schema or only asks."""
    off, on = workload_file.load("json-output").workloads
    assert {None} == {ask.json_schema and 1 for ask in workload_plan.plan(off, w.points(off)[0], 1, 1)}
    assert all(
        ask.json_schema == on.json.schema == off.json.schema for ask in workload_plan.plan(on, w.points(on)[0], 1, 1)
    )


# ---- replay

REPLAY = "workloads:\n  - name: again\n    replay: {log: requests.jsonl, speed: 2}\n"


def record(number: int, began_s: float, took_s: float, **more) -> RequestRecord:
    known = {
        "request_id": f"{number}",
        "ts": timestamp(began_s + took_s),
        "e2e_ms": took_s * 1000,
        "prompt_tokens": 10 + number,
        "completion_tokens": 5,
    }
    return RequestRecord(**{**known, **more})


def test_a_log_is_sent_again_as_it_began(tmp_path):
    lines = [
        record(0, 1_000_000.0, 9.0, team="a"),  # began first, ended last
        record(1, 1_000_002.0, 1.0),
        record(2, 1_000_004.0, 0.5, completion_tokens=None),
        record(3, 1_000_005.0, 0.5, ts=None),
    ]
    (tmp_path / "requests.jsonl").write_bytes(b"".join(map(to_line, reversed(lines))) + b"no record\n")
    workload = loaded(REPLAY, tmp_path).workloads[0]
    assert 3 == workload.replay.left_out
    (point,) = w.points(workload)
    asks = workload_plan.plan(workload, point, 1, 1)
    assert [(0.0, 10, 5, "a"), (1.0, 11, 5, None)] == [
        (ask.due_s, ask.prompt_tokens, ask.output_tokens, ask.kind) for ask in asks
    ]
    assert shape(asks) == shape(workload_plan.plan(workload, point, 2, 2))
    assert [10, 11] == [request["input_tokens"] for request in msgspec.to_builtins(workload.replay.requests)]
    said = w.resolved(workload)["replay"]
    assert (2, 2.0, 3, 12) == (said["requests"], said["speed"], said["left_out"], len(said["hash"]))
    assert 9.0 == pytest.approx(w.expected_seconds(workload, point, ttft_s=4.0, tpot_s=1.0), abs=1.1)


def test_a_replayed_log_fits_or_is_scaled(tmp_path):
    (tmp_path / "requests.jsonl").write_bytes(to_line(record(0, 1e6, 1.0, prompt_tokens=4000, completion_tokens=96)))
    workload = loaded(REPLAY, tmp_path).workloads[0]
    with pytest.raises(BadConfig, match=r": 4,000 .*\b96 .*\b1,024; --scale 0\.25 "):
        workload_fit.fitting(workload, 1024)
    (ask,) = workload_plan.plan(workload_fit.fitting(workload, 1024, 0.25), w.LoadLevel("replay"), 1, 1)
    assert (1000, 24) == (ask.prompt_tokens, ask.output_tokens)


def test_replay_shares_a_prefix_where_it_fits():
    """A replay can share a prefix among those that have room for it."""
    log = (w.Logged(0.0, 100, 5), w.Logged(1.0, 20, 5))
    workload = w.Workload(name="again", shared_prefix_tokens=50, replay=w.Replay(requests=log))
    assert [[50, 50], [20]] == [
        [segment.tokens for segment in ask.segments]
        for ask in workload_plan.plan(workload, w.LoadLevel("replay"), 1, 1)
    ]


def test_a_log_that_cannot_be_sent_again_is_refused(tmp_path):
    with pytest.raises(BadConfig, match=r"again\.replay\.log: .*/requests\.jsonl .*: No such"):
        loaded(REPLAY, tmp_path)
    (tmp_path / "requests.jsonl").write_text('{"request_id": "x", "prompt_tokens": 5}\n')
    with pytest.raises(BadConfig, match=r"/requests\.jsonl .*ts, e2e_ms, prompt_tokens and completion_tokens"):
        loaded(REPLAY, tmp_path)
    with pytest.raises(BadConfig, match=r"\.replay: .*\blog, .*\brequests,"):
        loaded(REPLAY.replace("log: requests.jsonl, ", ""), tmp_path)


TRACE = """\
{"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 1300, "output_length": 7, "hash_ids": [0, 1, 9]}
{"timestamp": "x"}
"""


def test_a_trace_is_sent_again_with_its_shared_blocks(tmp_path):
    (tmp_path / "requests.jsonl").write_text(TRACE)
    workload = loaded(REPLAY, tmp_path).workloads[0]
    assert (1, True) == (workload.replay.left_out, "line 3:" in workload.replay.left_out_why)

    def prompts(workload: w.Workload, run: int = 1) -> list[tuple[float | None, list[int], set[str]]]:
        asks = workload_plan.plan(workload, w.LoadLevel("replay"), 1, run)
        return [
            (ask.due_s, [part.tokens for part in ask.segments], {part.key for part in ask.segments}) for ask in asks
        ]

    (first_s, first, begun), (second_s, second, more) = prompts(workload)
    assert (0.0, [512, 512, 76], 1.0, [512, 512, 276]) == (first_s, first, second_s, second)
    assert 2 == len(begun & more), "the leading blocks"
    assert begun.isdisjoint(prompts(workload, run=2)[0][2]), "no run finds the blocks of another"
    quarter = workload_fit.scaled(workload, 0.25)
    assert [[128, 128, 19], [128, 128, 69]] == [sizes for _, sizes, _ in prompts(quarter)]
    cut = msgspec.structs.replace(workload, max_input_tokens=600)
    assert [[512, 88]] * 2 == [sizes for _, sizes, _ in prompts(cut)]


@pytest.mark.parametrize("key", ["endpoint: chat", "shared_prefix_tokens: 4"])
def test_a_trace_with_blocks_says_itself_what_is_shared(tmp_path, key):
    (tmp_path / "requests.jsonl").write_text(TRACE)
    with pytest.raises(BadConfig, match=rf"again\.{key.partition(':')[0]}: hash_ids"):
        loaded(f"{REPLAY}    {key}\n", tmp_path)
    (tmp_path / "requests.jsonl").write_text("a,b\n1,2\n")
    with pytest.raises(BadConfig, match=r"again\.replay\.log: .*\(a, b\)"):
        loaded(REPLAY, tmp_path)


def test_a_run_can_send_part_of_a_log(tmp_path):
    """--requests was refused, as if the requests of the log stood in the workload file."""
    (tmp_path / "requests.jsonl").write_text(TRACE)
    suite, points = chosen(loaded(REPLAY, tmp_path), (), None, None, 1)
    (workload,) = suite.workloads
    assert 1 == len(workload_plan.plan(workload, points(workload)[0], 1, 1))
    with pytest.raises(BadConfig, match="of its own"):
        loaded(REPLAY.replace("speed: 2", "requests: [{offset_s: 0, input_tokens: 1, output_tokens: 1}]"), tmp_path)


# ---- how long


@pytest.mark.parametrize(
    ("said", "point", "seconds"),
    [
        ({"requests": 20}, w.LoadLevel("c4", concurrency=4), 5 * 2.0),
        ({"requests": 20, "rate": 2.0}, w.LoadLevel("r2", rate_per_s=2.0), 10 + 2.0),
        ({"requests": 20, "burst": w.Burst(size=8, every_s=5)}, w.LoadLevel("b8", burst=8), 2 * 5 + 2.0),
        ({"requests": 20, "turns": 5, "turn_tokens": 5}, w.LoadLevel("c4", concurrency=4), 5 * 2.0),
        ({"requests": 2}, w.LoadLevel("c4", concurrency=4), 2.0),
        (
            {
                "requests": 20,
                "classes": {
                    "a": w.RequestClass(share=1, output_tokens=20),
                    "b": w.RequestClass(share=3, output_tokens=4),
                },
            },
            C4,
            5 * 1.8,
        ),
    ],
)
def test_how_long_a_run_takes_is_said_beforehand(said, point, seconds):
    assert seconds == pytest.approx(w.expected_seconds(one(**said), point, ttft_s=1.0, tpot_s=0.1))
