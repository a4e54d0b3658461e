"""`vllm-watch gateway check`: explanation of teams.yaml in numbers, and its warnings.

Slots are reckoned as admission.py does it and shares as routing.py does; nothing is decided here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stack.config import BadConfig, read
from stack.gateway.admission import LATEST_S
from stack.gateway.config import GatewayConfig, no_engine, rooted, upstream_key
from stack.gateway.policy import BANDS, Band, Capacity, Policy, ServedModel, Team, Upstream
from stack.gateway.replicas import read_names
from stack.gateway.routing import Names, address_of, shared_weights
from stack.gateway.sharing import Share, divide, limits, share_mistakes, share_warnings
from stack.gateway.teams import anonymous_mistake, hidden, mistakes, ranges, read_policy

_ONLY_GATEWAY = set(GatewayConfig.__struct_fields__) - set(Policy.__struct_fields__)
_TIMEOUTS = ("prefill_s", "decode_s", "total_s")


def check(path: Path) -> dict[str, Any]:
    """Check teams.yaml, or gateway.yaml and the teams.yaml that it names: return the files, mistakes, warnings, and
    what `explain` returns.

    Where there are mistakes, there is nothing else."""
    wrong: list[str] = []
    odd: list[str] = []
    files = [str(path)]
    try:
        source, gateway = read(path), None
        if _is_gateway(source.data):
            gateway = rooted(source.into(GatewayConfig), path.parent)
            files.append(gateway.teams)
            wrong += map(source.locate, _key_mistakes(gateway))
            odd += map(source.locate, _readable("upstream_key_file", gateway.upstream_key_file))
            odd += map(source.locate, _readable("secret_file", gateway.secret_file))
        its_source, policy = read_policy(Path(gateway.teams) if gateway else path)
        wrong += map(its_source.locate, mistakes(policy))
        if gateway and not gateway.upstream and not policy.upstreams:
            wrong.append(source.locate(no_engine(gateway.teams)))
        if gateway and gateway.anonymous_team is not None and gateway.anonymous_team not in policy.teams:
            wrong.append(source.locate(anonymous_mistake(gateway.anonymous_team, gateway.teams)))
        replicas = _replicas(gateway)
        if replicas is not None:
            wrong += map(its_source.locate, share_mistakes(policy, replicas))
            odd += map(its_source.locate, share_warnings(policy, replicas))
    except BadConfig as error:
        wrong.append(str(error))
    if wrong:
        return {"files": files, "mistakes": [hidden(sentence) for sentence in wrong], "warnings": []}
    odd += map(its_source.locate, warnings(policy, gateway))
    return {"files": files, "mistakes": [], "warnings": odd, **explain(policy, gateway)}


def _is_gateway(data: Any) -> bool:
    """By its keys; `teams` stands in both, there as a path."""
    return isinstance(data, dict) and (bool(_ONLY_GATEWAY & data.keys()) or isinstance(data.get("teams"), str))


def _key_mistakes(gateway: GatewayConfig) -> Iterator[str]:
    try:
        upstream_key(gateway)
    except BadConfig as error:
        yield str(error)


# ---- what it means


def explain(policy: Policy, gateway: GatewayConfig | None = None) -> dict[str, Any]:
    """A checked policy in numbers; bands in the order in which they are served. Shares are 0 to 1.

    Without gateway.yaml its timeouts and its upstream are not known, and what would come from there is null or
    missing."""
    if gateway and gateway.upstream and not policy.upstreams:
        only = Upstream(url=gateway.upstream, key_file=gateway.upstream_key_file)
        policy = msgspec.structs.replace(policy, upstreams={address_of(only): only})
    ordered = sorted(policy.bands.items(), key=lambda item: item[1].rank)
    return {
        "capacity": msgspec.structs.asdict(policy.capacity),
        "bands": [_band(name, band, policy.capacity, gateway) for name, band in ordered],
        "teams": list(_teams(policy)),
        "models": [_model(name, model, policy) for name, model in policy.models.items()],
        "upstreams": [
            {"upstream": name, **msgspec.structs.asdict(upstream)} for name, upstream in policy.upstreams.items()
        ],
        "canary": policy.canary and msgspec.structs.asdict(policy.canary),
        "shares": list(shares(policy)),
        "replicas": _replicas(gateway),
        "replica_shares": list(_replica_shares(policy, gateway)),
    }


def _replicas(gateway: GatewayConfig | None) -> int | None:
    """Return how many replicas divide the limits; None for one alone, and for those that only DNS knows. Raises
    BadConfig for a file that cannot be read."""
    if gateway is None or gateway.sharing is None:
        return None
    sharing = gateway.sharing
    if sharing.replicas_file is None:
        return sharing.replicas
    names = read_names(Path(sharing.replicas_file))
    if not names:
        raise BadConfig(f"sharing.replicas_file: {sharing.replicas_file} names no replica; write one name a line")
    return len(set(names))


def _replica_shares(policy: Policy, gateway: GatewayConfig | None) -> Iterator[dict[str, Any]]:
    """Yield each limit with the share of each replica, the first of them first."""
    replicas = _replicas(gateway)
    if gateway is None or gateway.sharing is None or replicas is None:
        return
    indexed = gateway.sharing.index is not None or gateway.sharing.replicas_file is not None
    each = [divide(policy, (Share(replicas, index if indexed else None),)) for index in range(replicas)]
    for place, limit in limits(policy):
        yield {"limit": place, "of_all": limit, "of_each": [dict(limits(one)).get(place, 0) for one in each]}


def _band(name: str, band: Band, capacity: Capacity, gateway: GatewayConfig | None) -> dict[str, Any]:
    row = {"band": name, **msgspec.structs.asdict(band)}
    if gateway:
        row |= {name: getattr(gateway.timeouts, name) for name in _TIMEOUTS if row[name] is None}
    return row | {"most_slots": max(1, band.floor, math.floor(band.ceiling * capacity.slots))}


def _teams(policy: Policy) -> Iterator[dict[str, Any]]:
    """share_of_rank: while every team of the same rank has requests waiting."""
    rank = {name: policy.bands[team.band].rank for name, team in policy.teams.items()}
    for name, team in policy.teams.items():
        weights = sum(other.weight for other_name, other in policy.teams.items() if rank[other_name] == rank[name])
        share = round(team.weight / weights, 6)
        yield {
            "team": name,
            **msgspec.structs.asdict(team),
            "most_outputs": team.most_outputs,
            "rank": rank[name],
            "share_of_rank": share,
            "keys": len(team.keys),
        }


def _model(name: str, model: ServedModel, policy: Policy) -> dict[str, Any]:
    return {"model": name, **msgspec.structs.asdict(model), "upstreams": list(_serving(model, policy))}


def _serving(model: ServedModel, policy: Policy) -> Mapping[str, Upstream]:
    """The upstreams that share the requests for a model."""
    names = (
        [name for name, upstream in policy.upstreams.items() if upstream.kind == "engine"]
        if model.upstreams is None
        else model.upstreams
    )
    return {name: policy.upstreams[name] for name in names}


def shares(policy: Policy) -> Iterator[dict[str, Any]]:
    """Return the shares of the requests for each model, null for any; where upstreams take certain prompts only, for
    each range of sizes."""
    models: list[tuple[str | None, ServedModel]] = [*policy.models.items()] or [(None, ServedModel())]
    for name, model in models:
        upstreams = _serving(model, policy)
        for low, high, taking in ranges(upstreams, model.max_model_len):
            weights = shared_weights(upstreams, policy.canary)
            if not any(weights[one] for one in taking):  # they share alike, as routing.py does it
                weights |= dict.fromkeys(taking, 1.0)
            variants: dict[str, float] = {}
            for one in taking:
                variants[upstreams[one].variant] = variants.get(upstreams[one].variant, 0.0) + weights[one]
            for one in sorted(taking, key=lambda one: list(variants).index(upstreams[one].variant)):
                upstream, whole = upstreams[one], sum(variants.values())
                yield {
                    "model": name, "min_prompt_tokens": low, "max_prompt_tokens": high,
                    "variant": upstream.variant, "variant_share": round(variants[upstream.variant] / whole, 6),
                    "upstream": one, "share": round(weights[one] / whole, 6),
                }  # fmt: skip


# ---- what is odd


def warnings(policy: Policy, gateway: GatewayConfig | None = None) -> Iterator[str]:
    """Return warnings about settings that may not be intended: sentences that begin with a dotted place."""
    if not policy.teams:
        yield "teams: there are none, so nobody may ask"
    for name, team in policy.teams.items():
        if not team.keys and not (gateway and gateway.anonymous_team == name):
            unless = "" if gateway else ", unless it is the anonymous_team of gateway.yaml"
            yield (
                f"teams.{name}: it has no keys, so nobody can ask as this team{unless}; vllm-watch gateway key {name}"
                " makes one"
            )
        texts = (team.max_in_flight or 0) * (team.max_outputs or 0)
        if team.max_running and 0 < texts < team.max_running:
            yield (
                f"teams.{name}.max_running: {team.max_running} is never reached, since max_in_flight is"
                f" {team.max_in_flight} and max_outputs {team.max_outputs}"
            )
    yield from _unlimited(
        policy,
        "max_in_flight",
        lambda team: team.max_in_flight is None,
        "such a team may take every slot and place in the queue that the others leave free; set max_in_flight to bound"
        " it",
    )
    yield from _unlimited(
        policy,
        "max_outputs or max_running",
        lambda team: team.most_outputs is None,
        "one request of such a team may ask for 16384 texts of each of its prompts; set max_outputs to bound it",
    )
    yield from _unlimited(
        policy,
        "max_prompt_logprobs",
        lambda team: team.max_prompt_logprobs is None,
        "a few requests of such a team may keep an engine from answering anybody for minutes; set max_prompt_logprobs,"
        " such as 0 for none",
    )
    yield from _domain_warnings(policy)
    for name, band in policy.bands.items():
        if policy.bands is not BANDS and name not in {team.band for team in policy.teams.values()}:
            yield f"bands.{name}: no team is in it"
        if band.max_wait_s > LATEST_S:
            yield (
                f"bands.{name}.max_wait_s: {band.max_wait_s:g} s is longer than Retry-After can tell, at most"
                f" {LATEST_S:g} s"
            )
    yield from _model_warnings(policy)
    yield from _upstream_warnings(policy)


def _unlimited(policy: Policy, keys: str, missing: Callable[[Team], bool], free: str) -> Iterator[str]:
    """Warn about teams without a limit, where there are others to suffer from it."""
    names = [name for name, team in policy.teams.items() if missing(team)]
    if names and len(policy.teams) > 1:
        named = ", ".join(names[:5]) + (" and others" if len(names) > 5 else "")
        yield f"teams: {len(names)} of {len(policy.teams)} have no {keys} ({named}): {free}"


def _domain_warnings(policy: Policy) -> Iterator[str]:
    members = Counter(team.cache_domain for team in policy.teams.values())
    for name, team in policy.teams.items():
        if team.cache_domain is not None and members[team.cache_domain] == 1:
            yield (
                f"teams.{name}.cache_domain: no other team names {team.cache_domain}, so it shares cached prefixes with"
                " nobody"
            )


def _model_warnings(policy: Policy) -> Iterator[str]:
    names = Names(policy.models)
    visible = {names.of(name).model for team in policy.teams.values() for name in names.visible(team)}
    for name in policy.models:
        if policy.teams and name not in visible:
            yield f"models.{name}: no team may ask for it"


def _upstream_warnings(policy: Policy) -> Iterator[str]:
    fallbacks = {name for model in policy.models.values() for name in model.fallbacks}
    over_half: dict[str, dict[str, Any]] = {}
    for row in shares(policy):
        if row["variant"] == "canary" and row["variant_share"] > 0.5:
            over_half.setdefault(row["upstream"], row)
    for name, upstream in policy.upstreams.items():
        if upstream.kind == "api" and name not in fallbacks:
            yield f"upstreams.{name}: it is of kind api and no model has it among its fallbacks, so it is never asked"
        elif upstream.kind == "api" and not any(team.fallback_api for team in policy.teams.values()):
            yield f"upstreams.{name}: it is of kind api and no team has fallback_api, so it is never asked"
        if name in over_half:
            share, model = over_half[name]["variant_share"], over_half[name]["model"]
            yield (
                f"upstreams.{name}.variant: the canary gets {_percent(share)} of the requests for"
                f" {model or 'any model'}"
            )
        yield from _readable(f"upstreams.{name}.key_file", upstream.key_file)


def _readable(setting: str, file: str | None) -> Iterator[str]:
    """A key that every user of the machine may read. An unreadable file is reported elsewhere."""
    if file is not None and Path(file).exists() and Path(file).stat().st_mode & 0o004:
        yield f"{setting}: every user of this machine may read {file}; chmod 600 {file}"


# ---- for a person


@dataclass(frozen=True, slots=True)
class PolicyTable:
    """A table with its title."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def summary(findings: dict[str, Any]) -> str:
    """Files and capacity in a few lines."""
    c = findings["capacity"]
    tokens = f" with {c['tokens']} tokens together" if c["tokens"] else ""
    queued = f" with {c['queue_tokens']} tokens" if c["queue_tokens"] else ""
    return "\n".join(
        (
            " and ".join(findings["files"]),
            f"{c['slots']} requests at once{tokens}, {c['queue']}{queued} may wait",
            (
                f"down to {c['min_slots']} at once while an engine has more than {c['waiting']} waiting or over"
                f" {_percent(c['kv_usage'])} of its cache used"
            ),
        )
    )


def sheets(findings: dict[str, Any]) -> Iterator[PolicyTable]:
    """Yield everything that `explain` reports, as tables."""
    yield PolicyTable(
        "bands, first served first; those of one rank share",
        (
            "band",
            "rank",
            "slots at most",
            "slots first",
            "in engines",
            "waits at most",
            "first token",
            "next token",
            "whole reply",
        ),
        [
            (
                b["band"],
                str(b["rank"]),
                f"{b['most_slots']} ({_percent(b['ceiling'])})",
                str(b["floor"]),
                str(b["engine_priority"]),
                f"{b['max_wait_s']:g} s",
                *(_seconds(b[name]) for name in _TIMEOUTS),
            )
            for b in findings["bands"]
        ],
    )
    yield PolicyTable(
        "teams, with the share of each in its rank while all ask; - is no limit",
        ("team", "band", "weight", "share", "running", "in flight", "prompt tokens", "output tokens", "texts",
            "logprobs", "of prompts", "keys", "models", "api"),
        [
            (t["team"], t["band"], f"{t['weight']:g}", _percent(t["share_of_rank"]), _limit(t["max_running"]),
                _limit(t["max_in_flight"]),
             _limit(t["max_prompt_tokens"]), _limit(t["max_output_tokens"], f" ({t['over_output']})"),
             *(_limit(t[name]) for name in ("most_outputs", "max_logprobs", "max_prompt_logprobs")), str(t["keys"]),
             "all" if t["models"] is None else _list(t["models"]), "yes" if t["fallback_api"] else "no")
            for t in findings["teams"]
        ],
    )  # fmt: skip
    yield PolicyTable(
        "models" if findings["models"] else "models: any, names are passed on as they are",
        ("model", "aliases", "adapters", "tokens at most", "upstreams", "fallbacks"),
        [
            (
                m["model"],
                _list(m["aliases"]),
                _list(m["adapters"]),
                _limit(m["max_model_len"]),
                _list(m["upstreams"]),
                _list(m["fallbacks"]),
            )
            for m in findings["models"]
        ],
    )
    yield PolicyTable(
        "upstreams" if findings["upstreams"] else "upstreams: the one of gateway.yaml",
        ("upstream", "kind", "prompts", "variant", "weight", "asked for", "address"),
        [
            (
                u["upstream"],
                u["kind"],
                _prompts(u["min_prompt_tokens"], u["max_prompt_tokens"]),
                u["variant"],
                f"{u['weight']:g}",
                u["model"] or "the same name",
                u["url"],
            )
            for u in findings["upstreams"]
        ],
    )
    if findings["replica_shares"]:
        yield PolicyTable(
            f"limits, divided among {findings['replicas']} replicas",
            ("limit", "all", "each"),
            [(row["limit"], str(row["of_all"]), _each(row["of_each"])) for row in findings["replica_shares"]],
        )
    if findings["shares"]:
        yield PolicyTable(
            "shares of requests, without fallbacks",
            ("model", "prompts", "variant", "gets", "upstream", "gets"),
            [
                (
                    s["model"] or "any",
                    _prompts(s["min_prompt_tokens"], s["max_prompt_tokens"]),
                    s["variant"],
                    _percent(s["variant_share"]),
                    s["upstream"],
                    _percent(s["share"]),
                )
                for s in findings["shares"]
            ],
        )


def as_text(findings: dict[str, Any]) -> str:
    """Return the check as columns of plain text, for a file or a pipe."""
    parts = []
    if not findings["mistakes"]:
        parts += [summary(findings), *(_columns(sheet) for sheet in sheets(findings))]
    return "\n\n".join([*parts, verdict(findings)])


def verdict(findings: dict[str, Any]) -> str:
    """Warnings or mistakes, and the last word."""
    lines = [f"{kind[:-1]}: {text}" for kind in ("warnings", "mistakes") for text in findings[kind]]
    return "\n".join([*lines, "not in order" if findings["mistakes"] else "in order"])


def _columns(sheet: PolicyTable) -> str:
    if not sheet.rows:
        return sheet.title
    widths = [max(map(len, column)) for column in zip(sheet.head, *sheet.rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (sheet.head, *sheet.rows)
    ]
    return "\n".join([sheet.title, *(f"  {line}" for line in lines)])


def _each(shares: list[int]) -> str:
    """Return equal shares with their number, as `3 x 86, 85`."""
    times = Counter(shares)
    return ", ".join(f"{number} x {share}" if number > 1 else str(share) for share, number in times.items())


def _prompts(low: int | None, high: int | None) -> str:
    if high is None:
        return "all" if (low or 1) == 1 else f"{low} and more"
    return f"{low or 1} to {high}"


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _seconds(value: float | None) -> str:
    return "as gateway.yaml" if value is None else f"{value:g} s"


def _limit(value: int | None, more: str = "") -> str:
    return "-" if value is None else f"{value}{more}"


def _list(names: list[str]) -> str:
    return ", ".join(names) or "none"
