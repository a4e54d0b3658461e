"""Renewal of a gateway's lease in the background.

Invariant: admission never waits for the store. Until the first answer, or the first failure, nothing is admitted. A
lease holds to its end whatever happens to the store. After that, and only if the store has failed since, the fixed
share of the gateway holds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
from pathlib import Path

from stack.config import BadConfig
from stack.gateway.config import read_key
from stack.gateway.lease import AT_ONCE_S, PERIOD_S, Ceilings, LeaseHolder
from stack.gateway.lease_client import LeaseClient, LeaseStore, StoreLost
from stack.gateway.lease_usage import replica_usage
from stack.gateway.policy import Policy, policy_hash
from stack.gateway.services import Services
from stack.gateway.sharing import Sharing

RETRY_S = 1.0  # while the fixed share holds
# until a replica that joins has its part of the limits, which the others return at their next renewals
ANSWERS_TO_JOIN = 3
ROW_S = 0.0004  # longer between two requests for each team and limit in them: renewals stay below 1 % of a core
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
        self._answers = 0
        self._rows = 0  # teams and limits in the latest request
        self._policy: tuple[Policy, str] | None = None
        self.slots = services.life.terms.policy.capacity.slots
        services.admission.wanting = self._wake.set
        services.admission.lease(Ceilings({}, -math.inf), services.now())
        services.metrics.leases()
        services.life.joined = False

    @property
    def busy(self) -> int:
        """Slots in use at the other gateways."""
        return 0 if self._static else self._holder.busy

    async def run(self) -> None:
        """Renew until cancelled: every period, and soon after a team begins to wait."""
        while True:
            await self._renew()
            pause_s = RETRY_S if self._static else PERIOD_S
            at_once_s = min(PERIOD_S, AT_ONCE_S + ROW_S * self._rows)
            await asyncio.sleep(at_once_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause_s - at_once_s)
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
        usage = replica_usage(services.admission, self.slots, holder.counted)
        request, ceilings = holder.request(
            usage, self._client.run, self._hash(policy), services.now(), static=self._static, bye=bye
        )
        self._rows = len(request.claims) + len(request.teams)
        if not self._static and not bye:
            services.admission.lease(ceilings, services.now(), answered=False)
        reply = await self._client.renew(request)
        if not holder.receive(reply, request.sequence):
            if holder.taken:
                raise StoreLost(f"another gateway is called {holder.name}; give each gateway its own sharing.name")
            return
        services.admission.serve_elsewhere(holder.peers(reply))
        services.admission.lease(holder.ceilings(), services.now(), answered=holder.settled)
        self._static = False
        self._answered(1)
        services.metrics.leased(True, holder.live, holder.policies)
        differ = "; their policies differ: reload teams.yaml everywhere" if holder.policies > 1 else ""
        self._say(logging.INFO, f"{self._store.url} leases the limits to {holder.live} gateways{differ}")

    def _lose(self, why: str) -> None:
        services = self._services
        if services.now() >= self._holder.until and not self._static:
            self._static = True
            services.admission.lease(None, services.now())
            self._answered(ANSWERS_TO_JOIN)
        services.metrics.leased(not self._static, self._holder.live, self._holder.policies)
        if self._static:
            self._say(logging.WARNING, f"no lease from {self._store.url}, the fixed share of this gateway holds: {why}")

    def _answered(self, times: int) -> None:
        """Count answers of the store; with enough of them the gateway has joined. The fixed share needs none."""
        if self._answers < ANSWERS_TO_JOIN <= self._answers + times:
            self._services.life.joined = True
        self._answers += times

    def _say(self, level: int, text: str) -> None:
        if text != self._said:
            self._said = text
            _log.log(level, "%s", text)

    def _hash(self, policy: Policy) -> str:
        if self._policy is None or self._policy[0] is not policy:
            self._policy = policy, policy_hash(policy)
        return self._policy[1]

    def _password(self) -> str | None:
        file = self._store.password_file
        return None if file is None else read_key(Path(file), "sharing.store.password_file")
