"""Compiled teams.yaml for the data path: keys, names, routes, upstream headers.

Invariant: one value, exchanged as a whole. A request keeps the terms under which it came, so a reload in its middle
changes nothing for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack.config import BadConfig
from stack.gateway.config import GatewayConfig, no_engine, read_key, upstream_key
from stack.gateway.isolation import SECRET_FILE, Isolation, isolation_of
from stack.gateway.passed_headers import PassedHeaders, passed_headers
from stack.gateway.policy import Band, Policy, Team, Upstream
from stack.gateway.routing import Names, Router, address_of
from stack.gateway.sharing import share_mistakes
from stack.gateway.teams import Teams, load_policy, teams_of


@dataclass(frozen=True, slots=True)
class RuntimePolicy:
    """isolation: what keeps teams apart within an engine. headers: what only this upstream gets, by its name: its own
    key. passed: headers of clients that upstreams get."""

    policy: Policy
    teams: Teams
    names: Names
    router: Router
    upstreams: Mapping[str, Upstream]
    headers: Mapping[str, Mapping[str, str]]
    isolation: Isolation
    passed: PassedHeaders

    @property
    def addresses(self) -> dict[str, str]:
        """host:port of each upstream by its name."""
        return {name: address_of(upstream) for name, upstream in self.upstreams.items()}

    def team(self, name: str) -> Team:
        return self.policy.teams[name]

    def band(self, name: str) -> Band:
        """The band of a team."""
        return self.policy.bands[self.policy.teams[name].band]

    def listing(self, team: str, unix_s: float) -> dict[str, Any]:
        """Return the models of a team, for GET /v1/models: no engine knows aliases, nor what others serve, nor who may
        have what."""

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

        return {"object": "list", "data": [entry(name) for name in self.names.visible(self.team(team))]}


def load_terms(config: GatewayConfig) -> RuntimePolicy:
    """The terms of a gateway, from its teams file and, where that names no upstreams, its own. Raises BadConfig."""
    path = Path(config.teams)
    policy = load_policy(path)
    if config.sharing is not None and config.sharing.replicas is not None:
        for sentence in share_mistakes(policy, config.sharing.replicas):
            raise BadConfig(f"{path}: {sentence}")
    return terms_of(config, policy, path)


def terms_of(config: GatewayConfig, policy: Policy, path: Path) -> RuntimePolicy:
    """Return the runtime policy of a policy that was read from `path`. Raises BadConfig for keys that cannot be
    read."""
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
    return RuntimePolicy(policy, teams, names, router, upstreams, headers, isolation, passed)
