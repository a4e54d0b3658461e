"""Compiled teams.yaml for the data path: keys, names, routes, upstream headers.

Invariant: one value, exchanged as a whole. A request keeps the terms under which it came, so a reload in its middle
changes nothing for it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stack.config import BadConfig, read_text
from stack.gateway.config import GatewayConfig, no_engine, read_key, upstream_key
from stack.gateway.isolation import SECRET_FILE, Isolation, isolation_of
from stack.gateway.policy import Band, Policy, Team, Upstream
from stack.gateway.request_headers import PassedHeaders, passed_headers
from stack.gateway.routing import Names, Router, address_of
from stack.gateway.sharing import share_mistakes
from stack.gateway.teams import Teams, load_policy, teams_of, truncation

SETTLE_S, MOST_READS = 0.05, 40  # between two reads of a file that somebody may be writing; how many more at most


@dataclass(frozen=True, slots=True)
class RuntimePolicy:
    """isolation: what keeps teams apart within an engine. headers: what only this upstream gets, by its name: its own
    key. passed: headers of clients that upstreams get. text: of teams.yaml, to know a truncated one by."""

    policy: Policy
    teams: Teams
    names: Names
    router: Router
    upstreams: Mapping[str, Upstream]
    headers: Mapping[str, Mapping[str, str]]
    isolation: Isolation
    passed: PassedHeaders
    text: str
    listings: dict[tuple[str, ...] | None, bytes] = field(default_factory=dict)  # by the models of teams

    @property
    def addresses(self) -> dict[str, str]:
        """host:port of each upstream by its name."""
        return {name: address_of(upstream) for name, upstream in self.upstreams.items()}

    def team(self, name: str) -> Team:
        return self.policy.teams[name]

    def band(self, name: str) -> Band:
        """The band of a team."""
        return self.policy.bands[self.policy.teams[name].band]

    def listing(self, team: str, unix_s: float) -> bytes:
        """Return the models of a team, for GET /v1/models: no engine knows aliases, nor what others serve, nor who may
        have what. Made once: a thousand models take 2 ms."""
        models = self.team(team).models
        if (made := self.listings.get(key := None if models is None else tuple(models))) is not None:
            return made

        def entry(name: str) -> dict[str, Any]:
            model = self.policy.models[self.names.of(name).model or ""]
            entry = {
                "id": name,
                "object": "model",
                "created": int(unix_s),
                "owned_by": "vllm-watch",
                "root": self.names.of(name).model,
            }
            return entry if model.max_model_len is None else entry | {"max_model_len": model.max_model_len}

        listing = {"object": "list", "data": [entry(name) for name in self.names.visible(self.team(team))]}
        made = self.listings[key] = json.dumps(listing).encode()
        return made


def load_terms(
    config: GatewayConfig, policy: Policy | None = None, *, text: str = "", former: RuntimePolicy | None = None
) -> RuntimePolicy:
    """The terms of a gateway, from its teams file and, where that names no upstreams, its own. Raises BadConfig.

    policy: what was read from this text of that file. former: the terms in force, where it is read anew: a file that
    may be truncated is refused then."""
    path = Path(config.teams)
    if policy is None:
        text = read_text(path)
        policy = load_policy(path, text)
    if former is not None and (cut := truncation(former.policy, former.text, policy, text)):
        raise BadConfig(f"{path}: {cut}")
    if config.sharing is not None and config.sharing.replicas is not None:
        for sentence in share_mistakes(policy, config.sharing.replicas):
            raise BadConfig(f"{path}: {sentence}")
    return terms_of(config, policy, path, text)


def settled_text(path: Path) -> str:
    """Return the text of a file once nobody writes it: two reads, SETTLE_S apart, are equal. Raises BadConfig for one
    that is written on and on."""
    text = read_text(path)
    for _ in range(MOST_READS):
        time.sleep(SETTLE_S)
        latest, text = text, read_text(path)
        if latest == text:
            return text
    raise BadConfig(f"{path} is still being written; reload when it is complete")


def terms_of(config: GatewayConfig, policy: Policy, path: Path, text: str = "") -> RuntimePolicy:
    """Return the runtime policy of a policy that was read from `path`, as this text. Raises BadConfig for keys that
    cannot be read."""
    single = Upstream(url=config.upstream.rstrip("/")) if config.upstream else None
    upstreams = policy.upstreams or ({address_of(single): single} if single else {})
    if not upstreams:
        raise BadConfig(no_engine(str(path)))
    keys = {
        name: read_key(Path(one.key_file), f"upstreams.{name}.key_file")
        for name, one in upstreams.items()
        if one.key_file
    }
    if not policy.upstreams and (key := upstream_key(config)):
        keys = dict.fromkeys(upstreams, key)
    headers = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
    isolation = isolation_of(policy, Path(config.secret_file) if config.secret_file else path.with_name(SECRET_FILE))
    teams = teams_of(policy, str(path), config.anonymous_team)
    passed = passed_headers(config.pass_headers)
    names, router = Names(policy.models), Router(policy, single)
    return RuntimePolicy(policy, teams, names, router, upstreams, headers, isolation, passed, text)
