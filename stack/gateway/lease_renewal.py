"""Renewal of a gateway's lease in the background.

Invariant: admission never waits for the store. Until the first answer, or the first failure, nothing is admitted. A
lease holds to its end whatever happens to the store. After that, and only if the store has failed since, the fixed
share of the gateway holds."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
import socket
from pathlib import Path

import msgspec

from stack.config import BadConfig
from stack.gateway.config import read_key
from stack.gateway.lease import AT_ONCE_S, PERIOD_S, Ceilings, LeaseHolder, ReplicaUsage, TeamUsage, Usage
from stack.gateway.lease_client import LeaseClient, LeaseStore, StoreLost
from stack.gateway.policy import Policy
from stack.gateway.services import Services
from stack.gateway.sharing import Sharing, part_of

RETRY_S = 1.0  # while the fixed share holds
_log = logging.getLogger("gateway")


def lease_renewal(sharing: Sharing | None, services: Services) -> LeaseRenewal | None:
    """Return the renewal where a store is configured. Raises BadConfig for a password or a certificate that cannot be
    read."""
    if sharing is None or sharing.store is None:
        return None
    return LeaseRenewal(sharing.store, sharing.name or socket.gethostname(), services)


class LeaseRenewal:
    """Lease of one gateway. slots: of all gateways, as the engines allow them."""

    def __init__(self, store: LeaseStore, name: str, services: Services) -> None:
        self._store, self._services = store, services
        self._holder = LeaseHolder(name, secrets.token_hex(8), linger_s=store.linger_s)
        self._password()  # a file that cannot be read is a mistake at the start, and a lost store later
        self._client = LeaseClient(store, store.tls(), self._password)
        self._wake = asyncio.Event()
        self._static = False
        self._said = ""
        self._sent: dict[str, int] = {}  # tokens charged to each team, as they were last sent
        self._policy: tuple[Policy, str] | None = None
        self.slots = services.life.terms.policy.capacity.slots
        services.admission.wanting = self._wake.set
        services.admission.lease(Ceilings(0, 0, {}, -math.inf), services.now())
        services.metrics.leases()

    @property
    def busy(self) -> int:
        """Slots in use at the other gateways."""
        return 0 if self._static else self._holder.busy

    async def run(self) -> None:
        """Renew until cancelled: every period, and soon after a team begins to wait."""
        while True:
            await self._renew()
            pause_s = RETRY_S if self._static else PERIOD_S
            await asyncio.sleep(AT_ONCE_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause_s - AT_ONCE_S)
            self._wake.clear()

    async def leave(self) -> None:
        """Return the lease, when nothing runs any more."""
        await self._renew()
        self._client.abort()

    async def _renew(self) -> None:
        """Renew once. A connection that has broken is opened anew before the store counts as lost."""
        try:
            try:
                await self._exchange()
            except StoreLost:
                await self._exchange()
        except (StoreLost, BadConfig) as error:
            self._lose(str(error))

    async def _exchange(self) -> None:
        services, holder = self._services, self._holder
        await self._client.connect()
        policy = services.life.terms.policy
        bye = services.life.draining and not services.admission.waiting
        request, ceilings = holder.request(
            self._usage(policy), self._client.run, self._hash(policy), services.now(), static=self._static, bye=bye
        )
        if not self._static and not bye:
            services.admission.lease(ceilings, services.now())
        reply = await self._client.renew(request)
        if not holder.receive(reply, request.sequence):
            if holder.taken:
                raise StoreLost(f"another gateway is called {holder.name}; give each gateway its own sharing.name")
            return
        services.admission.serve_elsewhere(holder.peers(reply))
        services.admission.lease(holder.ceilings(), services.now())
        self._static = False
        services.metrics.leased(True, holder.live, holder.policies)
        differ = "; their policies differ: reload teams.yaml everywhere" if holder.policies > 1 else ""
        self._say(logging.INFO, f"{self._store.url} leases the limits to {holder.live} gateways{differ}")

    def _lose(self, why: str) -> None:
        services = self._services
        if services.now() >= self._holder.until and not self._static:
            self._static = True
            services.admission.lease(None, services.now())
        services.metrics.leased(not self._static, self._holder.live, self._holder.policies)
        if self._static:
            self._say(logging.WARNING, f"no lease from {self._store.url}, the fixed share of this gateway holds: {why}")

    def _say(self, level: int, text: str) -> None:
        if text != self._said:
            self._said = text
            _log.log(level, "%s", text)

    def _usage(self, policy: Policy) -> ReplicaUsage:
        """Return what this gateway uses and needs of each limit."""
        admission, shares, budget = self._services.admission, self._services.life.shares, policy.capacity.tokens
        admission.whole_tokens = budget
        tokens = None
        if budget is not None:
            used, following = min(admission.tokens, budget), min(admission.next_tokens(), budget)
            large = following if used + following > (self._holder.ceilings().tokens or 0) else 0
            demand = min(budget, used + admission.waiting_tokens)
            tokens = Usage(used, demand, budget, part_of(shares, budget), large)
        teams = [
            TeamUsage(
                team.name, team.band.band.rank, team.team.weight, team.charged, team.in_flight,
                None if (most := policy.teams[team.name].max_running if team.name in policy.teams else None) is None
                else Usage(team.running, team.in_flight, most, part_of(shares, most)),
            )
            for team in admission.active(self._sent)
        ]  # fmt: skip
        self._sent |= {team.name: team.charged for team in teams}
        in_flight = admission.running + admission.waiting
        slots = Usage(admission.running, in_flight, self.slots, part_of(shares, self.slots))
        return ReplicaUsage(slots, tokens, tuple(teams))

    def _hash(self, policy: Policy) -> str:
        """Return a short hash of what gateways must agree on. It is no secret: keys are in teams.yaml as hashes."""
        if self._policy is None or self._policy[0] is not policy:
            agreed = msgspec.json.encode((policy.teams, policy.bands, policy.capacity), order="deterministic")
            self._policy = policy, hashlib.sha256(agreed).hexdigest()[:16]
        return self._policy[1]

    def _password(self) -> str | None:
        file = self._store.password_file
        return None if file is None else read_key(Path(file), "sharing.store.password_file")
