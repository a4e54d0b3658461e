"""Which upstream answers: names, shares, ranges, what is healthy, and what is tried next."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack.gateway.policy import Canary, Policy, ServedModel, Team, Upstream
from stack.gateway.routing import Names, RequestedModel, Router, UpstreamChoice, address_of, may_ask, name_at

STICKY = [b"team\0%d" % number for number in range(20_000)]


def fleet(**weights: float) -> dict[str, Upstream]:
    return {name: Upstream(url=f"http://{name}:8000", weight=weight) for name, weight in weights.items()}


def chosen(
    upstreams: dict[str, Upstream], sticky: bytes, *, est: int | None = 10, sick: str = "", excluded: str = ""
) -> str | None:
    choice = Router(Policy(upstreams=upstreams)).choose(
        None, est, sticky, set(upstreams) - set(sick), frozenset(excluded)
    )
    return choice and choice.name


def spread(upstreams: dict[str, Upstream], sticky: list[bytes] = STICKY) -> list[str]:
    """The name chosen for each, all healthy."""
    router, healthy = Router(Policy(upstreams=upstreams)), set(upstreams)
    choices = [router.choose(None, 10, it, healthy) for it in sticky]
    return [choice.name for choice in choices if choice]


# Names

NAMES = Names(
    {"qwen-7b": ServedModel(aliases=["qwen", "default"], adapters=["sql"]), "llama": ServedModel(aliases=["meta"])}
)


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("qwen-7b", RequestedModel("qwen-7b", "qwen-7b")),
        ("qwen", RequestedModel("qwen", "qwen-7b", send_as="qwen-7b")),
        ("meta", RequestedModel("meta", "llama", send_as="llama")),
        ("sql", RequestedModel("sql", "qwen-7b", adapter="sql")),
        ("gpt", RequestedModel("gpt")),
        ("", RequestedModel("")),
        (None, RequestedModel(None)),
    ],
)
def test_a_name_is_a_model_an_alias_an_adapter_or_unknown(name: str | None, means: RequestedModel):
    assert means == NAMES.of(name)


def test_without_models_every_name_passes_as_it_is():
    assert RequestedModel("anything") == Names({}).of("anything")


def test_own_model_name_goes_before_alias_or_adapter():
    """A model's own name goes before another one's alias or adapter."""
    names = Names({"a": ServedModel(aliases=["b"], adapters=["c"]), "b": ServedModel(), "c": ServedModel()})
    assert [RequestedModel("b", "b"), RequestedModel("c", "c")] == [names.of("b"), names.of("c")]


@pytest.mark.parametrize(
    ("models", "allowed"),
    [
        (None, ["qwen-7b", "llama", "qwen", "default", "sql", "meta"]),
        (["qwen-7b"], ["qwen-7b", "qwen", "default"]),  # its adapters are listed by their own names
        (["qwen-7b", "sql"], ["qwen-7b", "qwen", "default", "sql"]),
        (["sql"], ["sql"]),  # and an adapter does not open its model
        (["default"], ["default"]),
        ([], []),
    ],
)
def test_a_team_asks_for_what_it_lists(models: list[str] | None, allowed: list[str]):
    team = Team(models=models)
    assert sorted(allowed) == sorted(NAMES.visible(team))
    assert (models is None) == may_ask(team, NAMES.of("gpt"))
    assert (models is None) == may_ask(team, NAMES.of(None))


def test_a_list_of_models_holds_also_where_the_policy_names_none():
    asked = [Names({}).of(name) for name in ("a", "b")]
    assert [True, False] == [may_ask(Team(models=["a"]), it) for it in asked]


@pytest.mark.parametrize(
    ("kind", "model", "name", "written"),
    [
        ("engine", None, "qwen-7b", None),
        ("engine", None, "qwen", "qwen-7b"),
        ("engine", None, "sql", None),
        ("engine", "qwen-awq", "qwen-7b", "qwen-awq"),
        ("engine", "qwen-awq", "qwen", "qwen-awq"),
        ("engine", "qwen", "qwen", None),
        ("engine", "qwen-awq", "sql", None),
        ("engine", "qwen-awq", "gpt", None),  # a mistyped name must not be answered as if it were right
        ("engine", "qwen-awq", None, None),
        ("api", "big", "sql", "big"),
        ("api", None, "qwen", "qwen-7b"),
    ],
)
def test_the_body_names_the_model_as_the_upstream_knows_it(kind, model, name, written):
    assert written == name_at(Upstream(url="http://x", kind=kind, model=model), NAMES.of(name))


# Shares


def test_a_canary_of_5_percent_gets_5_percent():
    got = Counter(spread(fleet(stable=95, canary=5)))
    sigma = math.sqrt(20_000 * 0.05 * 0.95)
    assert 20_000 * 0.05 == pytest.approx(got["canary"], abs=4 * sigma)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_a_canary_gets_the_share_of_the_policy(share: float):
    """Whatever the weights are, which hold among the engines of one variant."""
    upstreams = {
        "a": Upstream(url="http://a", weight=3),
        "b": Upstream(url="http://b", weight=1),
        "new": Upstream(url="http://new", weight=50, variant="canary"),
    }
    router = Router(Policy(upstreams=upstreams, canary=Canary(share=share)))
    got = Counter(
        choice.name for sticky in STICKY if (choice := router.choose(None, None, sticky, {"a", "b", "new"})) is not None
    )
    part = {"a": 0.75 * (1 - share), "b": 0.25 * (1 - share), "new": share}
    for name, expected in part.items():
        sigma = math.sqrt(len(STICKY) * expected * (1 - expected))
        assert len(STICKY) * expected == pytest.approx(got[name], abs=4 * sigma)


def test_a_canary_of_share_0_answers_when_nothing_else_is_left():
    upstreams = {name: Upstream(url=f"http://{name}", variant="canary") for name in ("b", "c")}
    upstreams["a"] = Upstream(url="http://a")
    router = Router(Policy(upstreams=upstreams, canary=Canary(share=0.0)))
    got = Counter(
        choice.name for sticky in STICKY if (choice := router.choose(None, None, sticky, {"b", "c"})) is not None
    )
    assert len(STICKY) / 2 == pytest.approx(got["b"], abs=4 * math.sqrt(len(STICKY) / 4))
    assert len(STICKY) == got["b"] + got["c"]


def test_a_higher_share_of_a_canary_moves_requests_to_it_only():
    upstreams = {
        "a": Upstream(url="http://a"),
        "b": Upstream(url="http://b"),
        "new": Upstream(url="http://new", variant="canary"),
    }
    routers = [Router(Policy(upstreams=upstreams, canary=Canary(share=share))) for share in (0.05, 0.2)]
    for sticky in STICKY[:4000]:
        low, high = (router.choose(None, None, sticky, set(upstreams)) for router in routers)
        assert low is not None
        assert high is not None
        assert low.name == high.name or high.name == "new"


def test_a_model_that_only_the_canary_serves_is_not_shared():
    upstreams = {"new": Upstream(url="http://new", variant="canary", weight=2), "a": Upstream(url="http://a")}
    policy = Policy(upstreams=upstreams, models={"m": ServedModel(upstreams=["new"])}, canary=Canary(share=0.0))
    choice = Router(policy).choose("m", None, b"x", {"new", "a"})
    assert choice is not None
    assert "new" == choice.name


def test_shares_follow_weights_that_are_no_whole_numbers():
    weights = {"a": 0.25, "b": 0.5, "c": 1.75}
    got = Counter(spread(fleet(**weights)))
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        assert 20_000 * share == pytest.approx(got[name], abs=4 * math.sqrt(20_000 * share * (1 - share)))


def test_shares_of_those_that_remain_keep_their_proportions():
    router = Router(Policy(upstreams=fleet(a=1, b=1, c=2)))
    got = Counter(choice.name for it in STICKY if (choice := router.choose(None, 10, it, {"b", "c"})))
    assert 20_000 / 3 == pytest.approx(got["b"], abs=4 * math.sqrt(20_000 * 2 / 9))
    assert 0 == got["a"]


def test_a_choice_is_the_same_in_every_process():
    """Written down, so a change of the hash shows: it would move every request of a running canary."""
    router = Router(Policy(upstreams=(upstreams := fleet(a=1, b=1, c=1, d=2))))
    assert ["d", "b", "a", "a", "d", "d", "d", "b"] == spread(
        upstreams, [router.sticky("team", b"%d" % number) for number in range(8)]
    )


def test_a_higher_weight_draws_requests_and_moves_no_others():
    before, after = (
        spread(fleet(a=50, b=45, canary=5), STICKY[:4000]),
        spread(fleet(a=50, b=45, canary=20), STICKY[:4000]),
    )
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert {"canary"} == set(moved)


def test_weight_0_gets_nothing_while_another_is_left():
    assert {"a"} == set(spread(fleet(a=0.001, spare=0), STICKY[:2000]))
    assert "s" == chosen(fleet(a=1, s=0), b"x", excluded="a")


WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.floats(min_value=0.01, max_value=100), min_size=2)


@given(WEIGHTS, st.binary(max_size=200), st.data())
def test_when_one_goes_only_its_own_requests_move(weights: dict[str, float], sticky: bytes, data: st.DataObject):
    """Gone from the policy, sick or excluded: it is all the same to the others."""
    upstreams = fleet(**weights)
    gone = data.draw(st.sampled_from(sorted(weights)))
    before = chosen(upstreams, sticky)
    without = chosen({name: it for name, it in upstreams.items() if name != gone}, sticky)
    assert without == chosen(upstreams, sticky, sick=gone) == chosen(upstreams, sticky, excluded=gone)
    assert gone != without
    assert before in (gone, without)


@given(WEIGHTS, st.binary(max_size=200), st.randoms())
def test_the_order_in_the_file_does_not_matter(weights: dict[str, float], sticky: bytes, random):
    names = sorted(weights)
    random.shuffle(names)
    assert chosen(fleet(**weights), sticky) == chosen(fleet(**{name: weights[name] for name in names}), sticky)


# Candidates


@pytest.mark.parametrize(
    ("est", "names"), [(0, "ac"), (999, "ac"), (1000, "abc"), (1001, "bc"), (None, "abc"), (10**6, "bc")]
)
def test_upstream_gets_its_range_both_ends_included(est: int | None, names: str):
    """An upstream gets the prompts of its range both ends included."""
    upstreams = {
        "a": Upstream(url="http://a", max_prompt_tokens=1000),
        "b": Upstream(url="http://b", min_prompt_tokens=1000),
        "c": Upstream(url="http://c"),
    }
    assert set(names) == {chosen(upstreams, it, est=est) for it in STICKY[:200]}


def test_ranges_that_leave_nothing_are_ignored():
    upstreams = {
        "a": Upstream(url="http://a", max_prompt_tokens=10),
        "b": Upstream(url="http://b", min_prompt_tokens=20),
    }
    assert {"a", "b"} == {chosen(upstreams, it, est=15) for it in STICKY[:100]}


def test_ranges_hold_when_upstreams_are_sick():
    """An engine refuses what is too long for it, and the client would hear that its request was wrong."""
    upstreams = {
        "a": Upstream(url="http://a", max_prompt_tokens=10),
        "b": Upstream(url="http://b", min_prompt_tokens=11),
    }
    assert "b" == chosen(upstreams, b"x", est=15, sick="b")
    assert None is chosen(upstreams, b"x", est=15, excluded="b")


def test_a_sick_upstream_is_the_last_resort_and_says_so():
    upstreams = fleet(a=1, b=1)
    router = Router(Policy(upstreams=upstreams))
    for sticky in STICKY[:50]:
        assert UpstreamChoice("b", upstreams["b"]) == router.choose(None, 10, sticky, {"b"})
        best = router.choose(None, 10, sticky, {"a", "b"})
        assert best is not None
        assert UpstreamChoice(best.name, best.upstream, last_resort=True) == router.choose(None, 10, sticky, set())
        assert UpstreamChoice("b", upstreams["b"], last_resort=True) == router.choose(None, 10, sticky, {"a"}, {"a"})


def test_with_all_excluded_there_is_no_choice():
    assert None is chosen(fleet(a=1, b=1), b"x", excluded="ab")


@pytest.mark.parametrize(
    ("model", "names"), [("any", "abc"), ("one", "b"), ("two", "ac"), ("unknown", "abc"), (None, "abc"), ("none", "")]
)
def test_model_goes_to_its_upstreams_before_an_api(model: str | None, names: str):
    """A model goes to its own upstreams and never first to an api."""
    upstreams = {**fleet(a=1, b=1, c=1), "api": Upstream(url="https://api", kind="api", weight=1000)}
    models = {
        "any": ServedModel(),
        "one": ServedModel(upstreams=["b"]),
        "two": ServedModel(upstreams=["a", "c", "api"]),
        "none": ServedModel(upstreams=[]),
    }
    router = Router(Policy(upstreams=upstreams, models=models))
    choices = [router.choose(model, 10, it, set(upstreams)) for it in STICKY[:100]]
    assert set(names) == {choice.name for choice in choices if choice}


def test_without_upstreams_the_one_of_the_gateway_answers():
    single = Upstream(url="http://127.0.0.1:8001/")
    assert "127.0.0.1:8001" == address_of(single)
    for policy in (Policy(), Policy(models={"m": ServedModel()})):
        assert UpstreamChoice("127.0.0.1:8001", single) == Router(policy, single).choose(
            "m", 10, b"", {"127.0.0.1:8001"}
        )
    assert None is Router(Policy()).choose("m", 10, b"", set())


def test_policy_upstreams_replace_the_gateways():
    """Upstreams of the policy stand in place of the one of the gateway."""
    choice = Router(Policy(upstreams=fleet(a=1)), Upstream(url="http://single")).choose(None, 10, b"", {"single"})
    assert choice is not None
    assert ("a", True) == (choice.name, choice.last_resort)


def test_the_arm_of_a_canary_is_read_off_the_choice():
    choice = Router(Policy(upstreams={"new": Upstream(url="http://new", variant="canary")})).choose(
        None, 10, b"", {"new"}
    )
    assert choice is not None
    assert "canary" == choice.upstream.variant


# Fallbacks

FALLBACK = Policy(
    upstreams={
        **fleet(a=1, b=1, c=1),
        "small": Upstream(url="http://small", max_prompt_tokens=100),
        "api": Upstream(url="https://api", kind="api", model="big"),
    },
    models={"m": ServedModel(upstreams=["a", "b"], fallbacks=["api", "small", "b"]), "plain": ServedModel()},
)


@pytest.mark.parametrize(
    ("model", "first", "api", "est", "then"),
    [
        ("m", "a", True, 100, ["api", "small", "b"]),
        ("m", "a", False, 100, ["small", "b"]),
        ("m", "b", True, None, ["api", "small"]),
        ("m", "b", False, 101, []),
        ("m", None, False, 101, ["b"]),
        ("plain", "a", True, 100, []),
        ("unknown", "a", True, 100, []),
        (None, "a", True, 100, []),
    ],
)
def test_fallbacks_are_those_listed_in_their_order(model, first, api, est, then):
    choice = first and UpstreamChoice(first, FALLBACK.upstreams[first])
    got = Router(FALLBACK).fallbacks(model, choice, Team(fallback_api=api), est)
    assert then == [it.name for it in got]
    assert [FALLBACK.upstreams[name] for name in then] == [it.upstream for it in got]


@pytest.mark.parametrize("model", [ServedModel(upstreams=["gone"]), ServedModel(fallbacks=["gone"])])
def test_a_name_of_no_upstream_shows_when_the_policy_is_taken_up(model: ServedModel):
    with pytest.raises(KeyError, match="gone"):
        Router(Policy(upstreams=fleet(a=1), models={"m": model}))
