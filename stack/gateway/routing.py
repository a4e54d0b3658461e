"""Choice of upstream and variant for a request, and the model's name there.

Invariant: a choice is a pure function of the policy, the request and what is healthy: no state, no clock, no
randomness. Two gateways with one policy choose alike, and so does the same gateway after a restart."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from stack.gateway.policy import Canary, Policy, ServedModel, Team, Upstream

STICKY_BYTES = 64 << 10  # of a request tell it from others


@dataclass(frozen=True, slots=True)
class RequestedModel:
    """Meaning of a client's name for a model. name: of the client, None where it gave none.

    model: the name in Policy.models, None when unknown. send_as: the name to write into the body, None where the
    client's own stays.
    adapter: the LoRA adapter; its own name stays, since vLLM takes it as the model's."""

    name: str | None
    model: str | None = None
    send_as: str | None = None
    adapter: str | None = None


class Names:
    """Everything a client may ask for, as Policy.models says it. A model's own name goes before any alias or adapter of
    the same name."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._known: dict[str | None, RequestedModel] = {name: RequestedModel(name, name) for name in models}
        for name, model in models.items():
            for alias in model.aliases:
                self._known.setdefault(alias, RequestedModel(alias, name, send_as=name))
            for adapter in model.adapters:
                self._known.setdefault(adapter, RequestedModel(adapter, name, adapter=adapter))

    def of(self, name: str | None) -> RequestedModel:
        """The meaning of a name. An unknown one goes on as it is: the engine knows better what it serves."""
        return self._known.get(name) or RequestedModel(name)

    def visible(self, team: Team) -> list[str]:
        """The known names that a team may ask for, models first; empty where the policy names no models."""
        return [name for name, asked in self._known.items() if name is not None and may_ask(team, asked)]


def may_ask(team: Team, asked: RequestedModel) -> bool:
    """Return whether team.models allows it. A model's name there allows its aliases too, but not its adapters: each is
    listed by its own name, because an adapter is often one team's alone. A team with a list cannot leave the name
    out."""
    if team.models is None:
        return True
    return asked.name in team.models or (asked.adapter is None and asked.model in team.models)


def name_at(upstream: Upstream, asked: RequestedModel) -> str | None:
    """The name to write into the body for this upstream, None where the client's own stays.

    An engine that serves the model under another name still has the adapters under theirs; a foreign service has none,
    so there its own model answers in their place."""
    if upstream.model is None or asked.model is None or (asked.adapter is not None and upstream.kind == "engine"):
        return asked.send_as
    return upstream.model if upstream.model != asked.name else None


@dataclass(frozen=True, slots=True)
class UpstreamChoice:
    """One upstream to try. last_resort: no healthy one was left, and this is the best of the others."""

    name: str
    upstream: Upstream
    last_resort: bool = False


class Router:
    """Chooses among the upstreams of a policy, or the one of gateway.yaml where it has none. A checked policy is
    expected: a name of an upstream that does not exist raises KeyError here, not in the middle of a request."""

    def __init__(self, policy: Policy, single: Upstream | None = None) -> None:
        upstreams = policy.upstreams or ({} if single is None else {address_of(single): single})
        places = {
            name: _Place(name, upstream, blake2b(name.encode(), digest_size=8), upstream.weight)
            for name, upstream in upstreams.items()
        }
        self._several = len(places) > 1
        self._engines = [place for place in places.values() if place.upstream.kind == "engine"]
        self._canary = policy.canary
        self._any = self._shared(self._engines)
        self._serving: dict[str | None, list[_Place]] = {}
        self._fallbacks: dict[str | None, list[_Place]] = {}
        for name, model in policy.models.items():
            listed = self._engines if model.upstreams is None else [places[it] for it in model.upstreams]
            # others are only ever fallbacks
            self._serving[name] = self._shared([place for place in listed if place.upstream.kind == "engine"])
            self._fallbacks[name] = [places[it] for it in model.fallbacks]

    def _shared(self, places: list[_Place]) -> list[_Place]:
        """Return the places of a model with the weights that the canary's share gives them."""
        weights = shared_weights({place.name: place.upstream for place in places}, self._canary)
        return [replace(place, weight=weights[place.name]) for place in places]

    def sticky(self, team: str | None, body: bytes) -> bytes:
        """Return the key by which a request is drawn: 16 bytes of its team and its body as the client sent it, so that
        no change of ours moves it to another upstream. Empty where there is nothing to draw."""
        return blake2b(f"{team}\0".encode() + body[:STICKY_BYTES], digest_size=16).digest() if self._several else b""

    def choose(
        self,
        model: str | None,
        est_prompt_tokens: int | None,
        sticky: bytes,
        healthy: Container[str],
        excluded: Container[str] = frozenset(),
    ) -> UpstreamChoice | None:
        """The upstream for a request, None when all are excluded or none exists. model: as Asked has it; unknown ones
        may go to any engine.

        The same sticky bytes give the same upstream while the same ones are healthy; when one goes, only its own
        requests move. Without a healthy one the best of the others is tried: a probe may be stale, and a try is better
        than a sure refusal."""
        serving = self._serving.get(model, self._any)
        # ranges with a gap still get an answer
        fitting = [place for place in serving if place.takes(est_prompt_tokens)] or serving
        left = [place for place in fitting if place.name not in excluded]
        alive = [place for place in left if place.name in healthy]
        if not left:
            return None
        best = _heaviest(alive or left, sticky)
        return UpstreamChoice(best.name, best.upstream, last_resort=not alive)

    def has_other(self, model: str | None, name: str) -> bool:
        """Return whether another engine than this one serves the model."""
        return any(place.name != name for place in self._serving.get(model, self._engines))

    def fallbacks(
        self, model: str | None, choice: UpstreamChoice | None, team: Team, est_prompt_tokens: int | None = None
    ) -> list[UpstreamChoice]:
        """Return the upstreams to try after the choice failed, in the order of the policy; without those that do not
        take such a prompt.

        Only what is listed there, never other engines of the fleet: engines mostly fail from load, together, and
        retries that spread by themselves would multiply the load of a fleet that is going down."""
        return [
            UpstreamChoice(place.name, place.upstream)
            for place in self._fallbacks.get(model, ())
            if (choice is None or place.name != choice.name)
            and (team.fallback_api or place.upstream.kind != "api")
            and place.takes(est_prompt_tokens)
        ]


def shared_weights(upstreams: Mapping[str, Upstream], canary: Canary | None) -> dict[str, float]:
    """Return the weight of each upstream of a model by its name; where both the canary's variant and others serve it,
    the former together have the canary's share."""
    weights = {name: upstream.weight for name, upstream in upstreams.items()}
    if canary is None:
        return weights
    parts = {True: 0.0, False: 0.0}
    for upstream in upstreams.values():
        parts[upstream.variant == canary.variant] += upstream.weight
    if not all(parts.values()):
        return weights
    share = {True: canary.share, False: 1 - canary.share}
    of = {name: upstream.variant == canary.variant for name, upstream in upstreams.items()}
    return {name: weight * share[of[name]] / parts[of[name]] for name, weight in weights.items()}


def address_of(upstream: Upstream) -> str:
    """The name of the upstream of gateway.yaml, which has none of its own: host and port."""
    return upstream.url.split("://", 1)[-1].rstrip("/")


@dataclass(frozen=True, slots=True)
class _Place:
    """An upstream, the beginning of its hash (what comes after its name is the request's), and its weight."""

    name: str
    upstream: Upstream
    hash: blake2b
    weight: float

    def takes(self, prompt_tokens: int | None) -> bool:
        """Return whether its range, both ends included, holds such a prompt. One of unknown length fits everywhere."""
        low, high = self.upstream.min_prompt_tokens, self.upstream.max_prompt_tokens
        return prompt_tokens is None or (
            (low is None or prompt_tokens >= low) and (high is None or prompt_tokens <= high)
        )


def _heaviest(places: list[_Place], sticky: bytes) -> _Place:
    """Weighted rendezvous hashing: the place with the largest -weight / ln(u), u from (0, 1) by a hash of sticky bytes
    and name.

    Each gets its share of the weights, and a change of one place or weight moves only requests from it or to it. Weight
    0 gets nothing while another is left; where all have it, they share alike. Source: Thaler and Ravishankar 1998
    (rendezvous); Schindelhauer and Schomaker 2005 (the weights)."""
    if len(places) == 1:
        return places[0]

    def score(place: _Place) -> float:
        drawn = place.hash.copy()
        drawn.update(sticky)
        # 52 bits and a half are exact: never 0 or 1
        u = ((int.from_bytes(drawn.digest(), "little") >> 12) + 0.5) / (1 << 52)
        return -place.weight / math.log(u) if place.weight else u - 1

    return max(places, key=score)
