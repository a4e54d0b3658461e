"""Look-up of a request's team and rights from its key; loading and checks of teams.yaml.

Invariant: the file holds SHA-256 hashes of keys, never keys; a key is shown once, when it is made. Keys carry 192
random bits, so a plain hash is enough, and a look-up by hash takes the same time for a key that is nearly right as for
one that is not."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stack.config import BadConfig, YamlFile, meant, read
from stack.config import source as yaml_source
from stack.gateway.config import read_key, url_mistake
from stack.gateway.policy import Band, Canary, Capacity, Policy, ServedModel, Team, Upstream
from stack.gateway.request_headers import HEADER

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_KEY = re.compile(r"\bvw-[a-z0-9_-]+?-[A-Za-z0-9_-]{32}(?![A-Za-z0-9_-])")
_SECTIONS = ("teams", "bands", "models", "upstreams")


def make_key(team: str, random: Callable[[int], str] = secrets.token_urlsafe) -> tuple[str, str]:
    """A new key for a team, and the hash that goes into teams.yaml. Raises BadConfig for a name that cannot be a
    team."""
    if wrong := _name_mistake(team):
        raise BadConfig(f"the team: {wrong}")
    key = f"vw-{team}-{random(24)}"
    return key, hashed(key)


def first_terms(band: str, keys: list[str]) -> dict[str, object]:
    """Return the terms of a team in a teams.yaml that is made for somebody: with limits for what one request may
    multiply. Those of log-probabilities are vLLM's own, and of prompts what golden checks need."""
    narrow = band == "experimental"
    return {
        "band": band,
        "max_outputs": 4 if narrow else 16,
        "max_logprobs": 5 if narrow else 20,
        "max_prompt_logprobs": 0 if narrow else 1,
        "keys": keys,
    }


def hashed(key: str) -> str:
    """Return the hash of a key, for teams.yaml."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def hidden(text: str) -> str:
    """A message without any of our keys that came into it from a wrong place of the file."""
    return _KEY.sub("vw-...", text)


@dataclass(frozen=True, slots=True)
class Teams:
    """The loaded file. anonymous: the team of requests without a key, or None when they are refused."""

    by_hash: Mapping[str, str]
    names: frozenset[str]
    anonymous: str | None = None

    def of(self, key: str | None) -> str | None:
        """The team of a key, of no key at all when that is allowed, or None. A wrong key is never anonymous."""
        return self.anonymous if key is None else self.by_hash.get(hashed(key))


def teams_of(policy: Policy, place: str, anonymous: str | None = None) -> Teams:
    """The look-up for a file's content. Raises BadConfig for bad names, for keys instead of hashes and for a key of two
    teams."""
    for sentence in _key_mistakes(policy):
        raise BadConfig(f"{place}: {sentence}")
    if anonymous is not None and anonymous not in policy.teams:
        raise BadConfig(anonymous_mistake(anonymous, place))
    return Teams(
        {entry: name for name, team in policy.teams.items() for entry in team.keys}, frozenset(policy.teams), anonymous
    )


# ---- the whole file


def load_policy(path: Path, text: str | None = None) -> Policy:
    """teams.yaml, checked; key files with paths from its folder. text: its content, where it was read already. Raises
    BadConfig for the first mistake."""
    try:
        source, policy = read_policy(path, text)
        for sentence in mistakes(policy):
            raise BadConfig(source.locate(sentence))
    except BadConfig as error:
        raise BadConfig(hidden(str(error))) from None
    return policy


def read_policy(path: Path, text: str | None = None) -> tuple[YamlFile, Policy]:
    """teams.yaml, not yet checked; key files with paths from its folder. Raises BadConfig, which may hold a key: see
    `hidden`."""
    source = read(path) if text is None else yaml_source(text, str(path))
    policy = source.into(Policy)
    upstreams = {
        name: msgspec.structs.replace(upstream, key_file=upstream.key_file and str(path.parent / upstream.key_file))
        for name, upstream in policy.upstreams.items()
    }
    return source, msgspec.structs.replace(policy, upstreams=upstreams)


def truncation(former: Policy, former_text: str, policy: Policy, text: str) -> str | None:
    """Return why a file looks like one whose writing was cut off: an editor, cp and > empty a file first. None if it
    does not."""
    if former.teams and not policy.teams:
        return "teams: there are none left; start the gateway anew to run it without teams"
    if policy != former and text.strip() and former_text.startswith(text.rstrip()):
        return (
            "it ends in the middle of the former file; to remove what stood behind, add or change a line as well,"
            " such as a comment with the date"
        )
    if former_text.endswith("\n") and not text.endswith("\n"):
        return "its last line has no line break, so the end may be missing; end it with one"
    return None


def changes(old: Policy, new: Policy) -> list[str]:
    """Return the differences, one sentence for each place. The content of key files is not compared: they are read with
    the policy."""
    before, after = dict(_structs(old)), dict(_structs(new))
    gone = [f"{place} is gone" for place in before if place not in after]
    return gone + [
        sentence for place, struct in after.items() for sentence in _changes(place, before.get(place), struct)
    ]


def _changes(place: str, old: msgspec.Struct | None, new: msgspec.Struct) -> Iterator[str]:
    if old is None:
        yield f"{place} is new"
        return
    for name, now in msgspec.structs.asdict(new).items():
        was = getattr(old, name)
        if was != now:
            yield f"{place}.{name}: {_keys_changed(was, now) if name == 'keys' else f'{_word(was)} -> {_word(now)}'}"


def _keys_changed(was: list[str], now: list[str]) -> str:
    added, removed = len(set(now) - set(was)), len(set(was) - set(now))
    return (
        ", ".join(f"{number} {what}" for number, what in ((added, "added"), (removed, "removed")) if number)
        or "in another order"
    )


def _word(value: object) -> str:
    """A value as the file could have it."""
    return msgspec.json.encode(value).decode()


def _structs(policy: Policy) -> Iterator[tuple[str, msgspec.Struct]]:
    """Every part of a policy under its dotted place."""
    yield "capacity", policy.capacity
    if policy.canary is not None:
        yield "canary", policy.canary
    for section in _SECTIONS:
        for name, struct in getattr(policy, section).items():
            yield f"{section}.{name}", struct


# ---- mistakes


def mistakes(policy: Policy) -> Iterator[str]:
    """Return the mistakes of a policy that its types do not show: sentences, each of which begins with a dotted place.
    Reads the key files."""
    yield from _key_mistakes(policy)
    for place, struct in _structs(policy):
        yield from _number_mistakes(place, struct)
    for name, team in policy.teams.items():
        yield from _team_mistakes(f"teams.{name}", team, policy)
    floors = sum(band.floor for band in policy.bands.values())
    if floors > policy.capacity.slots:
        yield (
            f"capacity.slots: {policy.capacity.slots} is less than the floors of all bands together ({floors}); raise"
            " it or lower a floor"
        )
    yield from _name_mistakes(policy.models)
    for name, model in policy.models.items():
        yield from _model_mistakes(f"models.{name}", model, policy)
    for name, upstream in policy.upstreams.items():
        yield from _upstream_mistakes(f"upstreams.{name}", upstream)
    yield from _canary_mistakes(policy)
    yield from _gaps(policy)


def anonymous_mistake(anonymous: str, place: str) -> str:
    return f"anonymous_team: {anonymous} is not among the teams of {place}; add it there or use null"


def _name_mistake(name: str) -> str | None:
    right = _NAME.fullmatch(name)
    return (
        None
        if right
        else f"{hidden(name)[:60]!r} is no team name; use 1 to 40 of a-z 0-9 _ - and begin with a letter or digit"
    )


def _key_mistakes(policy: Policy) -> Iterator[str]:
    owners: dict[str, str] = {}
    for name, team in policy.teams.items():
        if wrong := _name_mistake(name):
            yield f"teams.{name}: {wrong}"
        for index, entry in enumerate(team.keys):
            where = f"teams.{name}.keys[{index}]"
            if not _HASH.fullmatch(entry):  # the entry itself is not shown: it may be a key
                yield (
                    f"{where} is no hash of a key; `vllm-watch gateway key {name}` makes a key and its sha256:... entry"
                )
            elif (other := owners.setdefault(entry, name)) != name:
                yield f"{where} is also a key of team {other}; give each team its own"


# how to say it, and whether a number is right; infinity and what is no number never are
_Range = tuple[str, Callable[[float], bool]]
_POSITIVE: _Range = ("more than 0", lambda n: 0 < n < math.inf)
_LIMIT: _Range = ("more than 0; leave it out for no limit", lambda n: 0 < n < math.inf)
_COUNT: _Range = ("0 or more", lambda n: 0 <= n < math.inf)
_SHARE: _Range = ("more than 0 and at most 1", lambda n: 0 < n <= 1)
_PART: _Range = ("from 0 to 1", lambda n: 0 <= n <= 1)
_NUMBERS: Mapping[type[msgspec.Struct], Mapping[str, _Range]] = {
    Team: {"weight": _POSITIVE, "max_running": _LIMIT, "max_in_flight": _LIMIT, "max_prompt_tokens": _LIMIT,
        "max_output_tokens": _LIMIT, "max_outputs": _LIMIT, "max_logprobs": _COUNT, "max_prompt_logprobs": _COUNT},
    Band: {"ceiling": _SHARE, "floor": _COUNT, "engine_priority": _COUNT, "max_wait_s": _COUNT, "prefill_s": _POSITIVE,
        "decode_s": _POSITIVE,
           "total_s": _POSITIVE},
    Capacity: {"slots": _POSITIVE, "tokens": _LIMIT, "queue": _COUNT, "queue_tokens": _COUNT, "waiting": _COUNT,
        "kv_usage": _SHARE,
               "stale_s": _POSITIVE, "min_slots": _POSITIVE},
    Canary: {"share": _PART, "final": _PART, "tolerance": _POSITIVE, "margin": _POSITIVE, "alpha": _SHARE,
        "max_error_ratio": _SHARE, "block_requests": _POSITIVE, "block_s": _POSITIVE, "settle_s": _COUNT,
        "step_s": _COUNT, "decide_s": _COUNT, "limit_s": _POSITIVE},
    ServedModel: {"max_model_len": _LIMIT},
    Upstream: {"weight": _POSITIVE, "min_prompt_tokens": _COUNT, "max_prompt_tokens": _LIMIT},
}  # fmt: skip


def _number_mistakes(place: str, struct: msgspec.Struct) -> Iterator[str]:
    for name, (words, right) in _NUMBERS[type(struct)].items():
        value = getattr(struct, name)
        if value is not None and not right(value):
            yield f"{place}.{name}: {f'{value:g}' if isinstance(value, float) else value} should be {words}"


def _team_mistakes(place: str, team: Team, policy: Policy) -> Iterator[str]:
    if team.band not in policy.bands:
        yield f"{place}.band: {team.band!r} is no band{meant(team.band, policy.bands)}"
    if team.cache_domain is not None and not _NAME.fullmatch(team.cache_domain):
        yield (
            f"{place}.cache_domain: {team.cache_domain[:60]!r} is no name; use 1 to 40 of a-z 0-9 _ - and begin with a"
            " letter or digit"
        )
    known = [
        name for model_name, model in policy.models.items() for name in (model_name, *model.aliases, *model.adapters)
    ]
    for index, name in enumerate(team.models or ()):
        if known and name not in known:
            yield f"{place}.models[{index}]: {name!r} is no model, alias or adapter{meant(name, known)}"


def _name_mistakes(models: Mapping[str, ServedModel]) -> Iterator[str]:
    """Two meanings of one name."""
    taken = {name: f"models.{name}" for name in models}
    for model_name, model in models.items():
        for field, names in (("aliases", model.aliases), ("adapters", model.adapters)):
            for index, name in enumerate(names):
                where = f"models.{model_name}.{field}[{index}]"
                if (other := taken.setdefault(name, where)) != where:
                    yield f"{where}: {name!r} is {other} already; a name leads to one model"


def _model_mistakes(place: str, model: ServedModel, policy: Policy) -> Iterator[str]:
    if model.upstreams == []:
        yield f"{place}.upstreams: none would serve it; leave it out for every upstream of kind engine"
    for field, names in (("upstreams", model.upstreams or []), ("fallbacks", model.fallbacks)):
        for index, name in enumerate(names):
            where = f"{place}.{field}[{index}]"
            if name not in policy.upstreams:
                yield f"{where}: {name!r} is no upstream{meant(name, policy.upstreams)}"
            elif name in names[:index]:
                yield f"{where}: {name!r} stands there twice"
            elif field == "upstreams" and policy.upstreams[name].kind == "api":
                yield f"{where}: {name!r} is of kind api, which is only ever a fallback; move it to fallbacks"


def _upstream_mistakes(place: str, upstream: Upstream) -> Iterator[str]:
    if wrong := url_mistake(upstream.url):
        yield f"{place}.url: {wrong}"
    low, high = upstream.min_prompt_tokens, upstream.max_prompt_tokens
    if low is not None and high is not None and low > high:
        yield f"{place}.min_prompt_tokens: {low} is more than max_prompt_tokens ({high})"
    for name in ("prefill_header", "decode_header"):
        if (header := getattr(upstream, name)) is not None and not HEADER.fullmatch(header):
            yield f"{place}.{name}: {header[:60]!r} is no name of a header; write it like x-prefill-engine"
    if upstream.key_file is not None:
        try:
            read_key(Path(upstream.key_file), f"{place}.key_file")
        except BadConfig as error:
            yield str(error)


def _canary_mistakes(policy: Policy) -> Iterator[str]:
    if policy.canary is None:
        return
    variants = {upstream.variant for upstream in policy.upstreams.values() if upstream.kind == "engine"}
    if (variant := policy.canary.variant) not in variants:
        yield f"canary.variant: {variant!r} is no variant of an engine among upstreams{meant(variant, variants)}"
    elif len(variants) == 1:
        yield f"canary.variant: every engine is of variant {variant!r}; nothing is left to compare it with"


def _gaps(policy: Policy) -> Iterator[str]:
    """Sizes of prompts that no upstream takes: of models with upstreams of their own, and of all others together."""
    engines = [name for name, upstream in policy.upstreams.items() if upstream.kind == "engine"]
    if policy.upstreams and not engines:
        yield "upstreams: none is of kind engine, and an api is only ever a fallback; add an engine"
        return
    lengths = [model.max_model_len for model in policy.models.values() if model.upstreams is None]
    served: dict[str, tuple[list[str], list[int | None]]] = (
        {"upstreams": (engines, lengths)} if lengths or not policy.models else {}
    )
    for name, model in policy.models.items():
        if model.upstreams and set(model.upstreams) <= set(engines):  # else it was reported already
            served[f"models.{name}.upstreams"] = (model.upstreams, [model.max_model_len])
    for place, (names, longest) in served.items():
        most = None if None in longest else max((length for length in longest if length), default=None)
        for low, high, taking in ranges({name: policy.upstreams[name] for name in names}, most):
            if not taking:
                sizes = f"{low} to {high}" if high else f"{low} and more"
                yield (
                    f"{place}: no upstream takes prompts of {sizes} tokens; widen min_prompt_tokens or"
                    " max_prompt_tokens of one"
                )


def ranges(
    upstreams: Mapping[str, Upstream], longest: int | None = None
) -> Iterator[tuple[int, int | None, list[str]]]:
    """Sizes of prompts from 1 token to the longest, cut where the upstreams that take them change: first, last (None
    for no end), which."""
    edges = {1} if upstreams else set()
    for upstream in upstreams.values():
        edges |= {max(1, upstream.min_prompt_tokens or 1)} | (
            {upstream.max_prompt_tokens + 1} if upstream.max_prompt_tokens else set()
        )
    some = sorted(edge for edge in edges if longest is None or edge <= longest)
    for low, following in itertools.zip_longest(some, some[1:]):
        taking = [
            n
            for n, u in upstreams.items()
            if (u.min_prompt_tokens or 1) <= low and (not u.max_prompt_tokens or low <= u.max_prompt_tokens)
        ]
        yield low, following and following - 1, taking
