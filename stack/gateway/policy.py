"""Structure of teams.yaml: limits, bands, models and upstreams.

Invariant: everything here is data. Admission, routing and the data path read it and never write it, so a reload is an
exchange of one value."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

import msgspec


class Band(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class of service. rank: lower is served first; bands of one rank share by the weights of their teams.

    ceiling: the share of all slots that it may hold, 0 to 1. floor: slots that it gets before higher bands get more.
    max_wait_s: how long a request may wait for admission. prefill_s, decode_s, total_s: as in gateway.yaml, which holds
    where this is null.
    engine_priority: the best priority that a request may ask for within an engine, whose smaller numbers go first; one
    that asks for none gets it. It counts in engines with --scheduling-policy priority, and where they hand it on: see
    docs/guides/gateway.md."""

    rank: int
    ceiling: float = 1.0
    floor: int = 0
    engine_priority: int = 0
    max_wait_s: float = 60.0
    prefill_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None


BANDS: dict[str, Band] = {
    "demo": Band(rank=0, max_wait_s=15.0),
    "replay": Band(rank=0, max_wait_s=30.0),
    "default": Band(rank=1),
    "experimental": Band(rank=2, ceiling=0.8, floor=2, max_wait_s=120.0),
}


class Team(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """keys: hashes as `make_key` gives them; several let one be replaced while the other still works.

    weight: its share against other teams of the same rank. max_running: slots that its requests hold at once, one for
    each text; further ones wait. max_in_flight: running and waiting together, further ones are refused.
    max_prompt_tokens, max_output_tokens: of one request; over_output says what happens to one that asks for more
    output. max_outputs: texts that one request may ask for, over all its prompts; max_running where that is set and
    this is not. max_logprobs, max_prompt_logprobs: log-probabilities of each token of output, and of the prompt; 0 for
    none at all. models: those it may ask for. fallback_api: whether upstreams of kind api may answer it.
    cache_domain: teams that name the same one share cached prefixes; null for a domain of its own.
    kv_transfer: whether it may send kv_transfer_params and ec_transfer_params, as a router of disaggregated prefill and
    decode does. probe: its requests are the operator's own checks, such as golden prompts: they are recorded as probes,
    and no team pays for them. Null is no limit. max_prompt_tokens is exact for token ids only: text is refused where it
    is certainly longer, and where the estimate is above the limit within a minute after the engine has counted too
    many."""

    keys: list[str] = []
    band: str = "default"
    weight: float = 1.0
    max_running: int | None = None
    max_in_flight: int | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_outputs: int | None = None
    max_logprobs: int | None = None
    max_prompt_logprobs: int | None = None
    over_output: Literal["clamp", "refuse"] = "clamp"
    models: list[str] | None = None
    fallback_api: bool = False
    cache_domain: str | None = None
    kv_transfer: bool = False
    probe: bool = False

    @property
    def most_outputs(self) -> int | None:
        """Return how many texts one request may ask for: more would take more slots than the team may hold."""
        return self.max_running if self.max_outputs is None else self.max_outputs


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Capacity of all engines together, and of the queue. slots: requests at once. tokens: prompt and expected output
    of those together.

    queue, queue_tokens: of what waits. Beyond waiting requests in an engine or kv_usage (0 to 1) the slots are lowered
    step by step, never below min_slots; figures older than stale_s count for nothing, and slots is what it says
    here."""

    slots: int = 256
    tokens: int | None = None
    queue: int = 1024
    queue_tokens: int | None = None
    waiting: int = 5
    kv_usage: float = 0.9
    stale_s: float = 5.0
    min_slots: int = 4


class ServedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One served model, by the name that engines know it by. aliases: other names that clients may use for it.

    adapters: LoRA adapters by name, asked for like a model. max_model_len: tokens of prompt and output together.
    upstreams: those that serve it, null for all of kind engine. fallbacks: upstreams to try in this order when the
    first choice fails before it has sent any content."""

    aliases: list[str] = []
    adapters: list[str] = []
    max_model_len: int | None = None
    upstreams: list[str] | None = None
    fallbacks: list[str] = []


class Upstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One endpoint. url: without /v1. key_file: holds its own key; a client's key is never forwarded. weight: its share
    of requests.

    variant: the variant of a canary in records and metrics. min_prompt_tokens, max_prompt_tokens: which prompts it
    takes, by estimate. kind api is a service that somebody else runs and bills: only a fallback, and only for
    teams with fallback_api.
    model: the name to ask it for, where it differs. prefill_header, decode_header: response headers in which a
    prefill/decode router names the two engines of a request; they go into the record and not to the client."""

    url: str
    key_file: str | None = None
    weight: float = 1.0
    variant: str = "stable"
    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    kind: Literal["engine", "api"] = "engine"
    model: str | None = None
    prefill_header: str | None = None
    decode_header: str | None = None


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One variant that gets a share of the requests for each model that other variants serve too, and how
    `vllm-watch canary` raises it. The gateway reads `variant` and `share` only; weights hold within a variant.

    share: 0 to 1; 0 is none while another variant is healthy. steps: shares, rising. final: share after a good verdict,
    null to keep that of the last step. tolerance: how much slower the canary may be, as the worst end of the interval,
    for the next step; margin: the same for the verdict `equivalent`. alpha: chance of a false verdict, over all metrics
    and looks. max_error_ratio: above it the share becomes 0 at once. In seconds: block_s, the unit of comparison;
    settle_s, left out after each change of the share; step_s, the least time at a share; decide_s, the least time until
    `better` or `equivalent`; limit_s, after which it is undecided."""

    variant: str = "canary"
    share: float = 0.0
    steps: tuple[float, ...] = (0.05, 0.2, 0.5)
    final: float | None = None
    tolerance: float = 0.1
    margin: float = 0.05
    alpha: float = 0.05
    max_error_ratio: float = 0.05
    block_requests: int = 30
    block_s: float = 60.0
    settle_s: float = 300.0
    step_s: float = 1800.0
    decide_s: float = 86_400.0
    limit_s: float = 604_800.0

    def __post_init__(self) -> None:
        """Refuse steps that cannot work; msgspec names the place."""
        rising = tuple(sorted(set(self.steps))) == self.steps
        if not (self.steps and rising and self.steps[0] > 0 and self.steps[-1] <= 1):
            raise ValueError("steps should be rising shares, each more than 0 and at most 1, such as [0.05, 0.2, 0.5]")


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """teams.yaml. Without upstreams there is the one of gateway.yaml; without models every name is passed on as it is.

    canary: the variant that gets a share of the requests.
    bands stand in place of the default ones (demo, replay, default, experimental)."""

    teams: Mapping[str, Team] = {}
    bands: Mapping[str, Band] = msgspec.field(default_factory=lambda: BANDS)
    capacity: Capacity = Capacity()
    models: Mapping[str, ServedModel] = {}
    upstreams: Mapping[str, Upstream] = {}
    canary: Canary | None = None


def policy_hash(policy: Policy) -> str:
    """Return a short hash of what gateways must agree on. It is no secret: keys are in teams.yaml as hashes."""
    agreed = msgspec.json.encode((policy.teams, policy.bands, policy.capacity), order="deterministic")
    return hashlib.sha256(agreed).hexdigest()[:16]
