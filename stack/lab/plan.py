"""Plan of the lab: every process with its command, address and health check, and the configuration files they read.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from alerts import printer, routing
from alerts.rules import Links
from alerts.settings import DEFAULTS, Settings
from exporters.catalogue import bounds
from exporters.catalogue.metric import key
from stack.deploy.fleet import budget
from stack.deploy.haproxy import LoadBalancer, configuration
from vllm_watch import module_command

TEAMS = ("demo", "replay", "default", "experimental")  # one for each band of the gateway
MODEL = "tiny"
SCRAPE_INTERVAL_S = 5
GATEWAYS_AT_MOST = 4

# One number for each listener; --port-offset moves them all.
PORTS = {
    "gateway": 8000, "vllm": 8001, "gateway-metrics": 8010, "sidecar": 9401, "board": 9402, "lab": 9403,
    "prometheus": 9090, "alertmanager": 9093,
    "otlp-grpc": 4317, "otlp-http": 4318, "otelcol": 8888,
    # with several gateways: HAProxy has the gateway's port
    "valkey": 8120,
    **{f"gateway-{n}": 8100 + n for n in range(GATEWAYS_AT_MOST)},
    **{f"gateway-{n}-metrics": 8110 + n for n in range(GATEWAYS_AT_MOST)},
    **{f"sidecar-{n}": 9410 + n for n in range(1, GATEWAYS_AT_MOST)},
}  # fmt: skip

UNSCRAPED = ("board", "haproxy", "valkey")  # processes that have no metrics


@dataclass(frozen=True, slots=True)
class Beat:
    """Intervals of the lab's checks and reports, in seconds."""

    scrape_s: int = SCRAPE_INTERVAL_S
    evaluate_s: int = SCRAPE_INTERVAL_S
    # an alert that fires before Alertmanager was discovered is sent again only after this time; the default is a minute
    resend_s: int = 10


@dataclass(frozen=True, slots=True)
class LabReplica:
    """One gateway and the sidecar that reads its log: the names of their processes, which are those of their ports and
    files."""

    index: int
    gateway: str
    sidecar: str
    log: Path


@dataclass(frozen=True, slots=True)
class LabConfig:
    """One lab. folder: its files and logs. engine_url: a vLLM that runs already, None to start one. Programs are paths;
    otelcol may be missing. gateways: with more than one, HAProxy is before them and they share limits in a Valkey.
    engine_version: of the vLLM to start; options that a release lacks, or any where it is not known, are left out.

    What drills change: settings and beat are those of its alerts; args and env are added to a process's, and so win;
    more goes into a configuration file. All three by name."""

    folder: Path
    programs: Mapping[str, Path]
    engine_url: str | None = None
    port_offset: int = 0
    teams: tuple[str, ...] = TEAMS
    settings: Settings = DEFAULTS
    beat: Beat = field(default_factory=Beat)
    args: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    engine_version: str = ""
    gateways: int = 1

    @property
    def replicas(self) -> tuple[LabReplica, ...]:
        if self.gateways == 1:
            return (LabReplica(0, "gateway", "sidecar", self.folder / "requests.jsonl"),)
        return tuple(
            LabReplica(n, f"gateway-{n}", f"sidecar-{n}" if n else "sidecar", self.folder / f"requests-{n}.jsonl")
            for n in range(self.gateways)
        )

    @property
    def buckets(self) -> tuple[str, ...]:
        """Arguments for the recommended histogram buckets, as far as the engine's release takes them."""
        takes = self.engine_version and key(self.engine_version) >= key(bounds.ENGINE_LADDER_SINCE)
        return bounds.engine_arguments() if takes else ()

    def port(self, name: str) -> int:
        return PORTS[name] + self.port_offset

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port(name)}"

    @property
    def engine(self) -> str:
        return self.engine_url or self.url("vllm")

    @property
    def with_collector(self) -> bool:
        return "otelcol" in self.programs

    @property
    def requests_log(self) -> Path:
        """The log of the first gateway."""
        return self.replicas[0].log

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the lab. health: answers 2xx when it serves, or a tcp:// address. ports: what it listens on."""

    name: str
    argv: tuple[str, ...]
    address: str
    health: str
    ports: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    within_s: float = 60.0


def processes(config: LabConfig) -> Iterator[Process]:
    """In the order in which they are started. Prometheus comes last, when the rest answers: else the first thing it
    would see and tell Alertmanager is an engine that is down because it still loads. Apart from that each survives the
    absence of the others."""
    if config.engine_url is None:
        yield _vllm(config)
    if config.with_collector:
        yield Process(
            "otelcol",
            (str(config.programs["otelcol"]), "--config", str(config.folder / "otelcol.yaml")),
            f"127.0.0.1:{config.port('otlp-grpc')}",
            f"{config.url('otelcol')}/metrics",
            ("otlp-grpc", "otlp-http", "otelcol"),
        )
    ours = module_command("stack.cli")
    if config.gateways > 1:
        yield from _before_gateways(config)
    for each in config.replicas:
        yield Process(
            each.gateway, (*ours, "gateway", "run", "--config", str(config.folder / f"{each.gateway}.yaml")),
            config.url(each.gateway), f"{config.url(each.gateway)}/-/healthy",
            (each.gateway, f"{each.gateway}-metrics"),
        )  # fmt: skip
        yield Process(
            each.sidecar, (*ours, "sidecar", "run", "--config", str(config.folder / f"{each.sidecar}.yaml")),
            config.url(each.sidecar), f"{config.url(each.sidecar)}/-/healthy", (each.sidecar,),
            env=config.env.get(each.sidecar, {}),
        )  # fmt: skip
    yield Process(
        "board",
        (*ours, "board", "--prometheus", config.url("prometheus"), "--listen", f"127.0.0.1:{config.port('board')}"),
        config.url("board"),
        f"{config.url('board')}/-/healthy",
        ("board",),
    )
    yield Process(
        "alertmanager",
        (
            str(config.programs["alertmanager"]),
            f"--config.file={config.folder / 'alertmanager.yml'}",
            f"--storage.path={config.folder / 'alertmanager'}",
            f"--web.listen-address=127.0.0.1:{config.port('alertmanager')}",
            "--cluster.listen-address=",
        ),
        config.url("alertmanager"),
        f"{config.url('alertmanager')}/-/ready",
        ("alertmanager",),
    )
    yield Process(
        "prometheus",
        (
            str(config.programs["prometheus"]),
            f"--config.file={config.folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={config.folder / 'prometheus'}",
            "--storage.tsdb.retention.time=2d",
            f"--rules.alert.resend-delay={config.beat.resend_s}s",
            f"--web.listen-address=127.0.0.1:{config.port('prometheus')}",
            "--enable-feature=exemplar-storage,extra-scrape-metrics,native-histograms",
            *config.args.get("prometheus", ()),
        ),
        config.url("prometheus"),
        f"{config.url('prometheus')}/-/ready",
        ("prometheus",),
    )


def _before_gateways(config: LabConfig) -> Iterator[Process]:
    """The store of the limits, and the load balancer."""
    port = config.port("valkey")
    words = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--maxmemory-policy", "noeviction")
    yield Process("valkey", (str(config.programs["valkey"]), *words), f"127.0.0.1:{port}", f"tcp://127.0.0.1:{port}",
                  ("valkey",))  # fmt: skip
    yield Process(
        "haproxy",
        (str(config.programs["haproxy"]), "-db", "-f", str(config.folder / "haproxy.cfg")),
        config.url("gateway"),
        f"{config.url('gateway')}/-/healthy",
        ("gateway",),
    )


def _vllm(config: LabConfig) -> Process:
    """A real vLLM on the CPU with a tiny random model: its numbers are real, its speed and its words mean nothing."""
    traces = ("--otlp-traces-endpoint", f"grpc://127.0.0.1:{config.port('otlp-grpc')}") if config.with_collector else ()
    return Process(
        "vllm",
        (
            str(config.programs["engine"]),
            "serve",
            str(config.programs["model"]),
            "--served-model-name",
            MODEL,
            "--host",
            "127.0.0.1",
            "--port",
            str(config.port("vllm")),
            "--enforce-eager",  # compiling would take longer than this model ever runs
            # Not bfloat16: on processors with AMX, vLLM 0.32 then ends with an illegal instruction. It asks the kernel
            # for AMX in matrix products that a model of this size does not use. The size is the same.
            "--dtype",
            "float16",
            "--max-model-len",
            "32768",
            "--max-num-seqs",
            "16",
            "--block-size",
            "32",  # the CPU default of 128 would keep short shared prefixes from ever hitting the cache
            "--enable-prompt-tokens-details",  # cached tokens in usage, else cache_hit stays unknown
            "--enable-per-request-metrics",  # engine queue time and TTFT of each request
            "--enable-request-id-headers",
            "--generation-config",
            "vllm",
            *traces,
            *config.buckets,
            *config.args.get("vllm", ()),
        ),
        config.url("vllm"),
        f"{config.url('vllm')}/health",
        ("vllm",),
        env={
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OTEL_SERVICE_NAME": "vllm",
            # The worker lives in the engine core's process. As one of its own it asks without end whether there is
            # work, which takes a core; and each process of a vLLM imports all of it, 13 s of CPU: 24 s and not 39 s
            # until it answers. The choice of
            # threads is ours then.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": "1",
            # --enforce-eager leaves what vLLM has torch compile by itself, as for logprobs: without a C++ compiler the
            # first such request ends it.
            "TORCHDYNAMO_DISABLE": "1",
        },
        within_s=240.0,
    )


def targets(config: LabConfig) -> dict[str, tuple[str, ...]]:
    """Scrape job -> addresses."""
    single = ("lab", "prometheus", "alertmanager", *(("otelcol",) if config.with_collector else ()))
    ports = {
        "gateway": [f"{each.gateway}-metrics" for each in config.replicas],
        "sidecar": [each.sidecar for each in config.replicas],
        **{name: [name] for name in single},
    }
    found = {job: tuple(f"127.0.0.1:{config.port(name)}" for name in names) for job, names in ports.items()}
    return {"vllm": (config.engine.split("://", 1)[1].rstrip("/"),), **found}


def job_of(process: str) -> str:
    """Return the scrape job of a process."""
    return process.rstrip("-0123456789")


def files(config: LabConfig) -> Iterator[tuple[str, str]]:
    """Name below the lab's folder and text of every configuration file. The rules are the default ones with links to
    this lab's board."""
    yield from rules(config)
    scheme = "https" if config.engine.startswith("https://") else "http"
    yield (
        "prometheus.yml",
        _yaml(
            {
                "global": {
                    "scrape_interval": f"{config.beat.scrape_s}s",
                    "evaluation_interval": f"{config.beat.evaluate_s}s",
                    "always_scrape_classic_histograms": True,
                },
                "rule_files": [f"{config.folder}/rules/*.yaml"],
                "alerting": {
                    "alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{config.port('alertmanager')}"]}]}]
                },
                "scrape_configs": [
                    {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
                    | ({"scheme": scheme} if job == "vllm" else {})
                    | ({"sample_limit": budget.SAMPLE_LIMIT[job]} if job in budget.SAMPLE_LIMIT else {})
                    for job, addresses in targets(config).items()
                ],
            }
        ),
    )
    yield "alertmanager.yml", routing.configuration()
    if config.gateways > 1:
        gateways = [f"127.0.0.1:{config.port(each.gateway)}" for each in config.replicas]
        yield (
            "haproxy.cfg",
            configuration(LoadBalancer(gateways=gateways, listen=f"127.0.0.1:{config.port('gateway')}")),
        )
    for each in config.replicas:
        yield f"{each.gateway}.yaml", _gateway(config, each)
        yield f"{each.sidecar}.yaml", _sidecar(config, each)
    if config.with_collector:
        yield "otelcol.yaml", _yaml({
            "receivers": {"otlp": {"protocols": {
                "grpc": {"endpoint": f"127.0.0.1:{config.port('otlp-grpc')}"},
                "http": {"endpoint": f"127.0.0.1:{config.port('otlp-http')}"},
            }}},
            "processors": {"memory_limiter": {"check_interval": "1s", "limit_mib": 128}, "batch": {}},
            "exporters": {"debug": {"verbosity": "basic"}},
            "service": {
                "pipelines": {"traces": {"receivers": ["otlp"], "processors": ["memory_limiter", "batch"],
                    "exporters": ["debug"]}},
                "telemetry": {"metrics": {"readers": [{"pull": {"exporter": {"prometheus": {
                    "host": "127.0.0.1", "port": config.port("otelcol"), "without_type_suffix": False,
                    # counters end in _total, as everyone's do
                }}}}]}},
            },
        })  # fmt: skip


def _gateway(config: LabConfig, replica: LabReplica) -> str:
    store = {"url": f"redis://127.0.0.1:{config.port('valkey')}", "fleet": "lab"}
    alone = config.gateways == 1
    sharing = {"replicas": config.gateways, "index": replica.index, "name": replica.gateway, "store": store}
    return _yaml({
        "listen": f"127.0.0.1:{config.port(replica.gateway)}",
        "metrics_listen": f"127.0.0.1:{config.port(f'{replica.gateway}-metrics')}",
        "upstream": config.engine, "requests_log": str(replica.log), "teams": str(config.folder / "teams.yaml"),
        # shorter together than the lab waits for a process to stop
        "timeouts": {"drain_s": 10} if alone else {"accept_grace_s": 4, "drain_s": 8},
        **({} if alone else {"sharing": sharing}),
        "liveness": {"idle_probe_s": None},  # what is counted here is what its user sent
        **config.more.get(f"{replica.gateway}.yaml", {}),
    })  # fmt: skip


def _sidecar(config: LabConfig, replica: LabReplica) -> str:
    """The first sidecar has the engine, and compares it with the logs of all gateways."""
    peers = [{"url": config.url(each.sidecar)} for each in config.replicas[1:]]
    first = {
        "engines": [{"name": "vllm-0", "url": config.engine}], "events": str(config.events),
        **({"peers": peers} if peers else {}),
    }  # fmt: skip
    spans = {"otlp": {"endpoint": config.url("otlp-http")}} if config.with_collector else {}
    return _yaml({
        "listen": f"127.0.0.1:{config.port(replica.sidecar)}", "requests_log": [str(replica.log)],
        "state": str(config.folder / f"{replica.sidecar}.state"), "teams": {"configured": list(config.teams)},
        **({"gpu": "off"} if replica.index else first),
        **spans,
        **config.more.get(f"{replica.sidecar}.yaml", {}),
    })  # fmt: skip


def rules(config: LabConfig) -> Iterator[tuple[str, str]]:
    """The alerts at the lab's settings, with links to its board."""
    links = Links(runbooks=f"{config.url('board')}/runbooks", dashboards=config.url("board"))
    yield from ((f"rules/{name}", text) for name, text in printer.rule_files(links, config.settings))


def _yaml(content: object) -> str:
    return yaml.safe_dump(content, sort_keys=False)
