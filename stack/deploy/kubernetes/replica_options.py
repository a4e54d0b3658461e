"""Options of `vllm-watch kubernetes export` for several gateways, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from stack.deploy.kubernetes.objects import STORE_SERVICE
from stack.gateway.lease_client import DEFAULT_PORT, LeaseStore
from stack.option import Opt

STORE_USER = "gateway"  # of valkey.sh
STORE_FOLDER = "/etc/vllm-watch/store"  # of the store's secret in the gateway's container
VALKEY_IMAGE = "valkey/valkey:9.1.2"
# Running requests for each gateway; 512 on one core were measured at +2.6 % (docs/internals/benchmark-gateway.md).
STREAMS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Gateways, each with a sidecar and a volume. most: an autoscaler adds gateways up to that number, as many as keep
    `streams` running requests for each. store: URL of the Valkey or Redis that leases limits to them; valkey: one of
    ours; without either each has a fixed share. store_secret: holds its password, and for a URL with TLS ca.crt.

    Raises ValueError."""

    count: Annotated[
        int, msgspec.Meta(ge=1), Opt(name="--replicas", metavar="N", help="Gateways, each with a sidecar and a volume.")
    ] = 1
    most: Annotated[
        int | None,
        msgspec.Meta(ge=2),
        Opt(name="--max-replicas", metavar="N", help="Add a HorizontalPodAutoscaler for up to N gateways."),
    ] = None
    streams: Annotated[
        int,
        msgspec.Meta(ge=1),
        Opt(name="--streams", metavar="N", help="Running requests per gateway that the autoscaler keeps."),
    ] = STREAMS
    store: Annotated[
        str, Opt(metavar="URL", help="Valkey or Redis that leases limits to the gateways.  [default: fixed shares]")
    ] = ""
    store_user: Annotated[str, Opt(metavar="NAME", help="ACL user of that store.")] = ""
    store_secret: Annotated[str, Opt(metavar="NAME", help="Secret with the store's password, and ca.crt for TLS.")] = ""
    valkey: Annotated[bool, Opt(help="Add a Valkey for the gateways, in place of --store.")] = False
    valkey_image: Annotated[str, Opt(metavar="IMAGE", help="Image of that Valkey.")] = VALKEY_IMAGE

    def __post_init__(self) -> None:
        if self.most is not None and self.most <= self.count:
            raise ValueError(f"--max-replicas {self.most} is no more than --replicas {self.count}; raise it")
        if self.store and self.valkey:
            raise ValueError("--store names a server of yours, and --valkey adds one; leave one of them out")
        if self.has_store and not self.several:
            raise ValueError("a store is for several gateways; add --replicas 2 or more")
        if self.valkey and not self.store_secret:
            raise ValueError("--valkey needs --store-secret NAME, a secret with its password; there is no default one")
        if (self.store_secret or self.store_user) and not self.has_store:
            raise ValueError("--store-secret and --store-user are for a store; add --store URL or --valkey")
        if self.valkey and self.store_user:
            raise ValueError(f"--valkey has the user {STORE_USER!r}; leave --store-user out")
        self.lease_store("default")  # with the checks of the gateway itself

    @property
    def several(self) -> bool:
        """Return whether there may be more than one gateway."""
        return self.count > 1 or self.most is not None

    @property
    def has_store(self) -> bool:
        return bool(self.store) or self.valkey

    def lease_store(self, fleet: str) -> LeaseStore | None:
        """Return the settings of the store, with paths in the pod; None for fixed shares. Raises ValueError."""
        if not self.has_store:
            return None
        with_tls = self.store.startswith(("rediss:", "valkeys:"))
        return LeaseStore(
            url=self.store or f"valkey://{STORE_SERVICE}:{DEFAULT_PORT}/0",
            user=STORE_USER if self.valkey else self.store_user or None,
            password_file=f"{STORE_FOLDER}/password" if self.store_secret else None,
            ca_file=f"{STORE_FOLDER}/ca.crt" if self.store_secret and with_tls else None,
            fleet=fleet,
        )
