"""HAProxy configuration for several gateways. Pure.

A request moves to another gateway only while nothing of it has been sent: refused connections are retried elsewhere,
and every request has a connection of its own, so that none meets a gateway that just closes an idle one. A gateway that
drains is taken out by its readiness; its streams run on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from stack.config import BadConfig

READY_PATH = "/-/ready"
CHECK_MS = 500  # a gateway drains for longer than this before it closes its listener: timeouts.accept_grace_s
NO_GATEWAY = (
    'http-error status 503 content-type application/json hdr Retry-After 2 string "'
    r"{\"error\":{\"message\":\"no gateway is ready; retry after 2 s\",\"type\":\"server_error\","
    r'\"code\":\"no_gateway\"}}"'
)
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\]|\*):(?P<port>\d{1,5})")
_FILE = re.compile(r"[A-Za-z0-9_./@+-]+")


class LoadBalancer(msgspec.Struct, frozen=True, kw_only=True):
    """HAProxy in front of gateways. gateways: HOST:PORT of each; listen: of clients.

    by_team: requests of one API key go to one gateway, up to `spill` times the mean load; else the gateway with the
    fewest connections. silence_s: longest time without a byte, which is the wait in the queue and the longest response
    without stream. certificate: PEM file with chain and key for clients. ca_file: of the gateways' certificates; with
    it connections to gateways are TLS. metrics_listen: of HAProxy's own metrics."""

    gateways: Sequence[str]
    listen: str = "127.0.0.1:8000"
    by_team: bool = False
    spill: float = 1.5
    silence_s: int = 3600
    certificate: str | None = None
    ca_file: str | None = None
    metrics_listen: str | None = None

    @property
    def has_names(self) -> bool:
        """Return whether an address has to be resolved."""
        return any(
            re.search(r"[A-Za-z]", address.rpartition(":")[0]) and "[" not in address for address in self.gateways
        )

    def __post_init__(self) -> None:
        """Refuse what HAProxy would refuse, or would read as another directive."""
        if not self.gateways:
            raise BadConfig("no gateway is named; write each as HOST:PORT")
        for address in (*self.gateways, self.listen, *((self.metrics_listen,) if self.metrics_listen else ())):
            found = _ADDRESS.fullmatch(address)
            if found is None or not 0 < int(found["port"]) < 65536:
                raise BadConfig(f"{address!r} is no address; write HOST:PORT, such as 10.0.0.5:8000")
        if repeated := {address for address in self.gateways if self.gateways.count(address) > 1}:
            raise BadConfig(f"{min(repeated)} is named twice; name each gateway once")
        for path in (self.certificate, self.ca_file):
            if path is not None and not _FILE.fullmatch(path):
                raise BadConfig(f"{path!r} has characters that HAProxy would need quoted; use another path")


def configuration(balancer: LoadBalancer) -> str:
    """Return the text of haproxy.cfg."""
    return "\n".join((*_general(balancer), *_frontends(balancer), *_backend(balancer))) + "\n"


def _general(balancer: LoadBalancer) -> Iterator[str]:
    yield f"""\
# Printed by `vllm-watch gateway haproxy`. For HAProxy 2.6 and later.
global
    log stdout format raw local0 notice
    # After a reload, the former process ends with its last stream or after this time.
    hard-stop-after {balancer.silence_s}s

defaults
    mode http
    log global
    option dontlognull
    timeout connect 2s
    timeout http-request 10s
    timeout http-keep-alive 60s
    # Between two bytes. A request that waits in a gateway's queue, or for a response without stream, is silent.
    timeout client {balancer.silence_s}s
    timeout server {balancer.silence_s}s
    # Finds a peer whose host is gone, which the timeouts above would take long for.
    option clitcpka
    option srvtcpka
    # Without any gateway, clients of OpenAI's interface get an error that they can read and retry.
    {NO_GATEWAY}"""
    if balancer.has_names:
        yield """
# Addresses of names are looked up again, as those of containers change.
resolvers system
    parse-resolv-conf
    hold valid 5s"""


def _frontends(balancer: LoadBalancer) -> Iterator[str]:
    tls = f" ssl crt {balancer.certificate}" if balancer.certificate else ""
    yield f"""
frontend clients
    bind {balancer.listen}{tls}
    default_backend gateways"""
    if balancer.metrics_listen:
        yield f"""
frontend metrics
    bind {balancer.metrics_listen}
    http-request use-service prometheus-exporter if {{ path /metrics }}
    http-request return status 404"""


def _backend(balancer: LoadBalancer) -> Iterator[str]:
    yield """
backend gateways"""
    if balancer.by_team:
        yield f"""\
    # By the API key, on a ring: when a gateway goes, only its own teams move.
    http-request set-var(txn.key) req.hdr(x-api-key)
    http-request set-var(txn.key) req.hdr(authorization) if {{ req.hdr(authorization) -m found }}
    balance hash var(txn.key)
    hash-type consistent
    # No gateway gets more than {balancer.spill:g} times the mean; what is beyond goes to the next one on the ring.
    hash-balance-factor {100 * balancer.spill:.0f}"""
    else:
        yield """\
    balance leastconn"""
    tls = f" ssl verify required ca-file {balancer.ca_file}" if balancer.ca_file else ""
    yield f"""\
    # One connection for each request: an idle one might be closed by a gateway that stops, just when it is used.
    option http-server-close
    # Only what was not sent is tried elsewhere: a second attempt could run, and be charged, twice.
    retries 3
    retry-on conn-failure
    option redispatch 1
    # A client that disconnects ends its request in the engine, too.
    option abortonclose
    # A gateway that drains is not ready. Never add `on-marked-down shutdown-sessions`: it would cut its streams.
    option httpchk
    http-check send meth GET uri {READY_PATH}
    http-check expect status 200
    timeout check 2s
    default-server check inter {CHECK_MS}ms fastinter {CHECK_MS // 5}ms fall 2 rise 1{tls}"""
    if balancer.has_names:
        yield "    default-server resolvers system init-addr libc,none"
    for number, address in enumerate(balancer.gateways):
        yield f"    server gateway-{number} {address}"
