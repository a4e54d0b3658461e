"""Options of `vllm-watch kubernetes export`, and their checks. Combinations that cannot work are rejected here, in
one sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated
from urllib.parse import urlsplit

from alerts import export, routing
from alerts.rules import Links
from alerts.settings import Overrides
from dashboards.model import Profile
from exporters.dataset.layout import check_name
from exporters.text import parse_window
from stack.deploy.kubernetes.objects import BOARD_SERVICE, PORTS, Object
from stack.deploy.kubernetes.replica_options import ReplicaOptions
from stack.deploy.kubernetes.ship_options import ShipOptions
from stack.gateway.config import url_mistake
from stack.option import Opt

Pairs = tuple[tuple[str, str], ...]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_OWN = re.compile(r"(?P<deployment>[^:/]+):(?P<volume>[^:/]+)/(?P<log>.+)")
_PLAIN = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_./]*")
_QUANTITY = re.compile(r"(?P<number>[1-9][0-9]*)(?P<unit>Mi|Gi|Ti|M|G|T)")
_UNITS = {"M": 10**6, "G": 10**9, "T": 10**12, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_IMAGE = re.compile(
    r"(?P<name>[a-z0-9][-a-z0-9._/]*(:[0-9]+/[-a-z0-9._/]+)?)(:[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?(@sha256:[0-9a-f]{64})?"
)

LEAST_SHIP_BYTES = 512 << 20  # besides: lines and segments that are not stored yet, and a small data set
LEAST_STATE_BYTES = 768 << 20  # two logs as the container `rotate` leaves them, and half as much for state and events
ONCE = ("rules", "boards")  # what counts or shows everything that one Prometheus has, whichever namespace it stands in


@dataclass(frozen=True, slots=True)
class Jobs:
    """Names of the scrape jobs, such that the rules find them."""

    engine: str
    gateway: str
    sidecar: str


@dataclass(frozen=True, slots=True)
class OwnGateway:
    """A Deployment of somebody's whose pods write a request log: its name, the volume, and the file as it is called
    from the volume's root.

    Raises ValueError."""

    deployment: str
    volume: str
    log: str

    def __post_init__(self) -> None:
        for name, known in ((self.deployment, _PREFIX), (self.volume, _NAME)):
            _expect(
                known, name, "--own-gateway", "is no name in Kubernetes; write it like DEPLOYMENT:VOLUME/requests.jsonl"
            )
        parts = self.log.split("/")
        if not _PLAIN.fullmatch(self.log) or "" in parts or ".." in parts:
            raise ValueError(
                f"--own-gateway: {self.log!r} is no path of a file from the root of the volume; write it like"
                " requests.jsonl"
            )

    @classmethod
    def parse(cls, text: str) -> OwnGateway:
        """DEPLOYMENT:VOLUME/FILE. Raises ValueError."""
        if not (found := _OWN.fullmatch(text)):
            raise ValueError(
                f"--own-gateway {text!r} is no DEPLOYMENT:VOLUME/FILE; write it like my-gateway:logs/requests.jsonl"
            )
        return cls(**found.groupdict())


def pairs(texts: tuple[str, ...], option: str) -> Pairs:
    """KEY=VALUE, several. Raises ValueError."""
    if wrong := next((text for text in texts if "=" not in text), None):
        raise ValueError(f"{option} {wrong!r} is no label; write it like KEY=VALUE")
    return tuple((key, value) for key, _, value in (text.partition("=") for text in texts))


def _as_texts(labels: Pairs) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """Without gateway, sidecar, board and routes an export holds rules, dashboards and the engines' monitor only:
    nothing that runs, and nothing that restricts.
    gateway: ours, with a sidecar in its pod. sidecar: alone, for engines without a request log; a gateway, ours or not,
    brings one. restrict_engines: only the gateway, Prometheus and other engines reach the engines.
    image: of vllm-watch. engines: addresses, without /v1, that the gateway and the sidecar use; a Service of several
    replicas is one engine to them. engine_selector, engine_port: the labels of the engines' pods, and the name or
    number of the port that they declare.
    operator_labels: what the Prometheus Operator selects our rules and monitors by. cluster: a label for every series,
    where one Prometheus sees several clusters. prometheus: what the board asks; without, the Service that the operator
    makes. interval: between scrapes.
    sample_limit: samples of one page, 0 for no limit; without, what stack/deploy/fleet/budget.py expects of each kind
    of page, with room.
    tls_secret: holds tls.crt, tls.key and ca.crt, for the pages that Prometheus reads. login_secret: holds token,
    without which nobody reads them.
    own_gateway: gets our sidecar, and ours is not written.
    job_label: a label of the engines' pods; its value becomes a part of their job. role_label: another, with their role
    in disaggregated serving; llm-d's by default. without: words of ONCE that another
    export has already brought.
    routes: kind of receiver of an AlertmanagerConfig; None for no such object. routes_secret: holds what its
    receivers need. gateways: how many, and what they share. shipping: the data set of their requests.

    Raises ValueError."""

    gateway: Annotated[bool, Opt(help="Add the gateway, with a sidecar in its pod.")] = False
    sidecar: Annotated[bool, Opt(help="Add a sidecar without a gateway.")] = False
    board: Annotated[bool, Opt(help="Add the board: dashboards and runbooks without Grafana.")] = False
    restrict_engines: Annotated[
        bool, Opt(help="Block clients that do not come through the gateway from the engines.")
    ] = False
    namespace: Annotated[str, Opt(metavar="NAME", help="Namespace of the engines, and of all objects.")] = "vllm"
    engines: Annotated[
        tuple[str, ...],
        Opt(name="--engine", metavar="URL", help="URL of an engine, for gateway and sidecar; repeatable."),
    ] = ("http://vllm:8000",)
    engine_selector: Annotated[
        Pairs,
        Opt(
            metavar="KEY=VALUE",
            help="Label of the engines' pods; repeat a key for any of its values.",
            convert=partial(pairs, option="--engine-selector"),
            write=_as_texts,
        ),
    ] = (("app", "vllm"),)
    engine_port: Annotated[str, Opt(metavar="PORT", help="Number or name of the engine port in those pods.")] = "8000"
    job_label: Annotated[
        str,
        Opt(
            name="--job-from-label",
            metavar="KEY",
            help="Label of the engines' pods whose value becomes part of the job.",
        ),
    ] = ""
    role_label: Annotated[
        str,
        Opt(
            name="--role-from-label",
            metavar="KEY",
            help="Label of the engines' pods with their role, prefill or decode.",
        ),
    ] = "llm-d.ai/role"
    operator_labels: Annotated[
        Pairs,
        Opt(
            name="--label",
            metavar="KEY=VALUE",
            help="Label by which the Prometheus Operator selects, such as release=NAME.",
            convert=partial(pairs, option="--label"),
        ),
    ] = ()
    monitoring: Annotated[str, Opt(name="--monitoring-namespace", metavar="NAME", help="Namespace of Prometheus.")] = (
        "monitoring"
    )
    prometheus: Annotated[
        str,
        Opt(metavar="URL", help=("URL of Prometheus for the board.  [default: prometheus-operated in that namespace]")),
    ] = ""
    cluster: Annotated[
        str, Opt(metavar="NAME", help="Label `cluster` for every series, if one Prometheus scrapes several clusters.")
    ] = ""
    interval: Annotated[str, Opt(metavar="TIME", help="Scrape interval; set the same in Grafana's data source.")] = (
        "30s"
    )
    sample_limit: Annotated[
        int | None,
        Opt(metavar="N", help=("Fail a scrape with more samples; 0: no limit.  [default: twice the expected number]")),
    ] = None
    image: str
    state_size: Annotated[str, Opt(metavar="SIZE", help="Size of the volume for request log and state.")] = "1Gi"
    storage_class: Annotated[
        str, Opt(metavar="NAME", help="Storage class of that volume.  [default: the cluster's]")
    ] = ""
    teams_secret: Annotated[str, Opt(metavar="NAME", help="Secret with teams.yaml.")] = "vllm-watch-teams"  # noqa: S105  a name
    tls_secret: Annotated[
        str, Opt(metavar="NAME", help="Secret with tls.crt, tls.key and ca.crt, for metrics over TLS.")
    ] = ""
    login_secret: Annotated[
        str, Opt(metavar="NAME", help="Secret with a token that scrapers of gateway and sidecar must send.")
    ] = ""
    own_gateway: Annotated[
        OwnGateway | None,
        Opt(
            metavar="DEPLOYMENT:VOLUME/FILE",
            help="Your gateway and the path of its request log; its pods get the sidecar.",
            convert=OwnGateway.parse,
        ),
    ] = None
    routes: Annotated[
        str | None,
        Opt(
            name="--alertmanager-config",
            choices=tuple(routing.RECEIVERS),
            help="Add an AlertmanagerConfig with routes to a receiver of this kind.",
        ),
    ] = None
    routes_secret: Annotated[
        str, Opt(name="--alertmanager-secret", metavar="NAME", help="Secret with the keys that its receivers read.")
    ] = "vllm-watch-alertmanager"  # noqa: S105  a name
    without: Annotated[
        tuple[str, ...],
        Opt(choices=ONCE, help="Leave a part out, for a second namespace of one Prometheus; repeatable."),
    ] = ()
    gateways: ReplicaOptions = field(default_factory=ReplicaOptions)
    shipping: ShipOptions = field(default_factory=ShipOptions)
    rules: export.AlertOptions = field(default_factory=export.AlertOptions)

    def __post_init__(self) -> None:
        self._expect_names()
        self._expect_engines()
        self._expect_labels()
        _expect_port(self.engine_port)
        self._expect_scrapes()
        self._expect_parts()
        self._expect_links()
        self._expect_jobs()

    def _expect_parts(self) -> None:
        if self.gateway and self.own_gateway:
            raise ValueError("--gateway adds ours, and --own-gateway is for one of yours; leave one of them out")
        if self.gateways.several and not self.gateway:
            raise ValueError("--replicas and --max-replicas are for the gateway of vllm-watch; add --gateway")
        if self.shipping.dataset and not self.gateway:
            raise ValueError("--ship is for the request log of the gateway of vllm-watch; add --gateway")
        for option, given in (("--tls-secret", self.tls_secret), ("--login-secret", self.login_secret)):
            if given and not self.with_sidecar:
                raise ValueError(
                    f"{option} protects the metrics of gateway and sidecar; add --gateway, --sidecar or --own-gateway"
                )
        if self.restrict_engines and not (self.gateway or self.own_gateway):
            raise ValueError(
                "--restrict-engines lets only a gateway ask the engines, and there is none; add --gateway or"
                " --own-gateway"
            )

    def _expect_links(self) -> None:
        """Links in alerts must lead somewhere for everybody who is notified."""
        if "rules" in self.without and "boards" in self.without:
            return
        for option, url in (("--runbook-base", self.links.runbooks), ("--dashboard-base", self.links.dashboards)):
            if url and export.is_loopback(url):
                raise ValueError(
                    f"{option} is missing or leads to this machine alone ({url}); write the address that people on"
                    f" call open, such as https://{'wiki' if 'runbook' in option else 'grafana'}.example.org, or add"
                    " --board, which serves both"
                )

    def _expect_names(self) -> None:
        for what, name in (
            ("--namespace", self.namespace),
            ("--monitoring-namespace", self.monitoring),
            ("--teams-secret", self.teams_secret),
            ("--alertmanager-secret", self.routes_secret),
        ):
            _expect(
                _NAME, name, what, "is no name in Kubernetes; write lower-case letters, digits and '-', such as vllm"
            )
        for what, name in (
            ("--tls-secret", self.tls_secret),
            ("--login-secret", self.login_secret),
            ("--storage-class", self.storage_class),
            ("--store-secret", self.gateways.store_secret),
            ("--ship-secret", self.shipping.secret),
        ):
            if name:
                _expect(_PREFIX, name, what, "is no name in Kubernetes; write lower-case letters, digits, '-' and '.'")
        if self.cluster:
            _expect(_PLAIN, self.cluster, "--cluster", "is no name; write letters, digits, '-', '_', '.' and '/'")
        for what, image in (("--image", self.image), ("--valkey-image", self.gateways.valkey_image)):
            _expect(_IMAGE, image, what, "is no image; write it like registry.example.org/vllm-watch:0.1.0")
        if _bytes(self.state_size) < LEAST_STATE_BYTES:
            raise ValueError(
                f"--state-size {self.state_size}: two logs of 256 MiB lie there beside the state; write 1Gi or more"
            )
        if self.shipping.dataset:
            check_name("--ship: --cluster", self.cluster or self.namespace)
            if _bytes(self.state_size) < LEAST_STATE_BYTES + LEAST_SHIP_BYTES:
                raise ValueError(
                    f"--state-size {self.state_size}: with --ship, segments lie there beside two logs of 256 MiB; write"
                    " 2Gi or more"
                )

    def _expect_engines(self) -> None:
        if not self.engines or not self.engine_selector:
            raise ValueError(
                "--engine and --engine-selector: at least one of each is needed, or nothing would be watched"
            )
        for url in self.engines:
            if wrong := url_mistake(url):
                raise ValueError(f"--engine {wrong}")

    def _expect_labels(self) -> None:
        for what, pairs in (("--engine-selector", self.engine_selector), ("--label", self.operator_labels)):
            for key, value in pairs:
                _expect_label(what, key, value)
        keys = [key for key, _ in dict.fromkeys(self.operator_labels)]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ValueError(
                f"--label {twice} has two values; an object has one for each key, so leave one of them out"
            )

    def _expect_jobs(self) -> None:
        if self.role_label:
            _expect_label("--role-from-label", self.role_label)
        job, pattern = self.jobs.engine, self.rules.settings.overlay.engine_job
        if not self.job_label:
            return
        _expect_label("--job-from-label", self.job_label)
        if not re.fullmatch(pattern, f"{job}-model"):
            raise ValueError(
                f"--job-from-label makes jobs such as {job}-model, and engine_job {pattern!r} does not match it; write"
                f" '{job}.*' there"
            )

    def _expect_scrapes(self) -> None:
        if self.prometheus and (
            urlsplit(self.prometheus).scheme not in ("http", "https") or not urlsplit(self.prometheus).hostname
        ):
            raise ValueError(
                f"--prometheus {self.prometheus!r} is no web address; write it like"
                " http://prometheus-operated.monitoring.svc:9090"
            )
        if parse_window(self.interval) < 1:
            raise ValueError(f"--interval {self.interval} is too short; 30s is what it is without")
        if (self.sample_limit or 0) < 0:
            raise ValueError("--sample-limit is a number of samples, or 0 for no limit")

    @property
    def with_sidecar(self) -> bool:
        return self.sidecar or self.gateway or self.own_gateway is not None

    @property
    def sidecar_alone(self) -> bool:
        """Return whether the sidecar has a pod of its own, and no request log."""
        return self.sidecar and not self.gateway and self.own_gateway is None

    @property
    def runs_pods(self) -> bool:
        """Return whether anything of ours runs, so that an image is needed."""
        return self.with_sidecar or self.board

    @property
    def profile(self) -> Profile:
        return Profile.FULL if self.with_sidecar else Profile.ENGINE

    @property
    def links(self) -> Links:
        """Return where alerts lead: to the addresses that were given, else to the board where it is exported."""
        given, usual = self.rules.links, Links()
        if not self.board:
            return given
        board = f"http://{BOARD_SERVICE}.{self.namespace}.svc:{PORTS['board']}"
        return Links(
            f"{board}/runbooks" if given.runbooks == usual.runbooks else given.runbooks,
            board if given.dashboards == usual.dashboards else given.dashboards,
        )

    @property
    def engine_pods(self) -> Object:
        """Return the label selector of the engines' pods: every key must match, with any of its values."""
        values: dict[str, list[str]] = {}
        for key, value in dict.fromkeys(self.engine_selector):
            values.setdefault(key, []).append(value)
        alone = {key: only for key, (only, *others) in values.items() if not others}
        several = [{"key": key, "operator": "In", "values": given} for key, given in values.items() if len(given) > 1]
        return {name: part for name, part in (("matchLabels", alone), ("matchExpressions", several)) if part}

    @property
    def engines_speak_tls(self) -> bool:
        return all(url.startswith("https:") for url in self.engines)

    @property
    def secrets(self) -> dict[str, str]:
        """Return the secrets that protect what Prometheus scrapes: the name of each secret by the folder in which a
        container sees it."""
        return {name: secret for name, secret in (("tls", self.tls_secret), ("login", self.login_secret)) if secret}

    @property
    def prometheus_url(self) -> str:
        return self.prometheus or f"http://prometheus-operated.{self.monitoring}.svc:9090"

    @property
    def prometheus_port(self) -> int:
        url = urlsplit(self.prometheus_url)
        return url.port or (443 if url.scheme == "https" else 80)

    @property
    def image_name(self) -> str:
        """The image without tag and digest: what kustomize replaces it by."""
        found = _IMAGE.fullmatch(self.image)
        return found["name"] if found else self.image

    @property
    def jobs(self) -> Jobs:
        """Raises ValueError for settings that none of our jobs could match."""
        return _jobs(self.rules.settings.overlay)

    @property
    def engine_names(self) -> dict[str, str]:
        """Address of each engine by a short name: the first word of its host where that is unique."""
        hosts = [urlsplit(url).hostname or "" for url in self.engines]
        short = [host.split(".")[0] for host in hosts]
        names = short if len(set(short)) == len(short) else [urlsplit(url).netloc for url in self.engines]
        return dict(zip(names, (url.rstrip("/") for url in self.engines), strict=True))


def _jobs(overlay: Overrides) -> Jobs:
    return Jobs(
        *(_job(getattr(overlay, setting), setting, usual)
          for setting, usual in (("engine_job", "vllm"), ("gateway_job", "gateway"), ("sidecar_job", "sidecar")))
    )  # fmt: skip


def _job(pattern: str, setting: str, usual: str) -> str:
    """The usual name where the pattern of the rules has it, else the pattern itself where it is a plain name."""
    if re.fullmatch(pattern, usual):
        return usual
    if _PLAIN.fullmatch(pattern):
        return pattern
    raise ValueError(
        f"{setting} {pattern!r} of the file for --thresholds does not match {usual!r} and is no name itself; write one,"
        f" such as {usual}-2"
    )


def _expect(pattern: re.Pattern[str], text: str, what: str, otherwise: str) -> None:
    if not pattern.fullmatch(text):
        raise ValueError(f"{what} {text!r} {otherwise}")


def _expect_label(what: str, key: str, value: str = "") -> None:
    prefix, slash, name = key.rpartition("/")
    if (
        not _LABEL.fullmatch(name)
        or (slash and not _PREFIX.fullmatch(prefix))
        or (value and not _LABEL.fullmatch(value))
    ):
        raise ValueError(f"{what} '{key}={value}' is no label in Kubernetes; write it like app.kubernetes.io/name=vllm")


def _bytes(size: str) -> int:
    if not (found := _QUANTITY.fullmatch(size)):
        raise ValueError(f"--state-size {size!r} is no size; write it like 1Gi")
    return int(found["number"]) * _UNITS[found["unit"]]


def _expect_port(text: str) -> None:
    numbered = text.isdecimal() and 0 < int(text) < 65536
    named = re.fullmatch(r"(?=.{1,15}$)(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*", text)
    if not (numbered or named):
        raise ValueError(
            f"--engine-port {text!r} is neither a port number nor the name of a container's port, such as 8000 or http"
        )
