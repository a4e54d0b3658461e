"""Files of the Helm chart: templates from the objects of `vllm-watch kubernetes export`, with an expression in place of
each option; rules, dashboards and routes as files that no template parses.

_helpers.tpl and NOTES.txt of the chart are written by hand. Helm itself passes values through JSON, so numbers are
formatted by `int` or `toYaml`; and it merges mappings, so a default that a user must be able to replace is empty there
and filled in by _helpers.tpl."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from alerts import managed_files, routing
from alerts.export import AlertOptions, numbers
from alerts.printer import as_yaml
from alerts.rules import Links
from dashboards.model import Profile
from stack.deploy.fleet import files as fleet
from stack.deploy.helm import values
from stack.deploy.helm.template import Expr, Lines, When, YamlBlock, several, text_of
from stack.deploy.kubernetes import monitoring, notifications, policies, replicas, running
from stack.deploy.kubernetes.objects import GATEWAY, OMIT, Object, load, load_one
from stack.deploy.kubernetes.options import KubernetesOptions
from stack.deploy.kubernetes.replica_options import STORE_FOLDER
from stack.deploy.kubernetes.ship_options import CREDENTIALS, VOLUME

CHART = Path("stack/deploy/helm/vllm-watch")
# addresses in files/, which _helpers.tpl replaces by those of the release
LINKS = Links("http://runbooks.vllm-watch.invalid", "http://dashboards.vllm-watch.invalid")
PROFILES = {"full": Profile.FULL, "engine": Profile.ENGINE}  # dashboards with and without gateway and sidecar
PRINTED_ONLY = ("files/rules", "files/routes", *(f"files/dashboards/{folder}" for folder in PROFILES))
_BY_HAND = ("_helpers.tpl", "NOTES.txt")
_HEADER = "{{- /* Printed by `vllm-watch render` from stack/deploy/kubernetes and stack/deploy/helm. */ -}}\n"
_SIDECAR = "or .Values.gateway.enabled .Values.sidecar.enabled"
_ALONE = "and .Values.sidecar.enabled (not .Values.gateway.enabled)"
_ONE_ENGINE = "eq (len .Values.engines.endpoints) 1"
_SECRETS = {
    "tls": ".Values.tls.existingSecret",
    "login": ".Values.login.existingSecret",
    "store": ".Values.store.existingSecret",
    "ship": ".Values.ship.existingSecret",
}
_SEVERAL = 'include "vllm-watch.severalGateways" .'
_ONE_GATEWAY = f"and .Values.gateway.enabled (not ({_SEVERAL}))"
_VALKEY = ".Values.store.valkey.enabled"
_STORE = 'include "vllm-watch.storeUrl" .'
_SHIPS = ".Values.ship.dataset"
_IN_STORE = f'hasPrefix "s3://" {_SHIPS}'
_SCALED = "gt (int .Values.gateway.autoscaling.maxReplicas) 0"
_POLICIES = {
    "vllm-watch-closed": "or .Values.gateway.enabled .Values.sidecar.enabled .Values.board.enabled",
    "vllm-watch-board": ".Values.board.enabled",
    "vllm-watch-gateway": ".Values.gateway.enabled",
    "vllm-watch-sidecar-alone": _ALONE,
    "vllm-watch-gateway-peers": _SEVERAL,
    "vllm-watch-store": _VALKEY,
    "vllm-watch-gateway-store": _STORE,
    "vllm-watch-gateway-ship": _SHIPS,
    "vllm-watch-engines": ".Values.engines.restrict",
}
_OF_PODS = ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "imagePullSecrets")


def write(folder: Path, rules: AlertOptions, version: str, force: bool = False) -> tuple[dict[Path, bool], list[Path]]:
    """Write the whole chart; whether each file changed, and files of an earlier chart that this one does not have.

    Raises NotOurs before anything is written, and OSError."""
    by_hand = importlib.resources.files("stack.deploy.helm").joinpath("vllm-watch", "templates")
    files = {f"templates/{name}": by_hand.joinpath(name).read_text(encoding="utf-8") for name in _BY_HAND}
    files |= dict(printed(rules, version))
    is_ours = "name: vllm-watch\n" in _read(folder / "Chart.yaml")

    def foreign(path: Path) -> str:
        return "" if is_ours else "did not come from here"

    written = managed_files.write(folder, files, foreign, force)
    older = []
    for part in PRINTED_ONLY:
        names = [Path(name).name for name in files if name.startswith(f"{part}/")]
        older += managed_files.left_over(folder / part, names, foreign, "*.*")
    return written, older


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def printed(rules: AlertOptions, version: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file of the chart that is printed."""
    wanted = KubernetesOptions(image="vllm-watch", rules=replace(rules, links=LINKS))
    yield "Chart.yaml", values.chart(version)
    rows = values.table(_containers(), _security())
    yield "values.yaml", values.text(rows)
    yield "values.schema.json", values.schema(rows)
    for name, text in templates(wanted):
        yield f"templates/{name}", _HEADER + text
    yield "files/thresholds.yml", numbers(wanted.rules.settings)
    for part, made in monitoring.rules(wanted):
        yield f"files/rules/{part}.yaml", as_yaml(made["spec"]["groups"])
    for folder, profile in PROFILES.items():
        for slug, made in monitoring.boards(replace(wanted, sidecar=profile is Profile.FULL)):
            [(_, text)] = made["data"].items()
            yield f"files/dashboards/{folder}/{slug}.json", text
    for receiver in routing.RECEIVERS:
        made = notifications.alertmanager_config(replace(wanted, routes=receiver))
        yield f"files/routes/{receiver}.yaml", as_yaml(made["spec"])


def templates(wanted: KubernetesOptions) -> Iterator[tuple[str, str]]:
    """Yield name and text of each template."""
    yield "_config.tpl", _define("config", _config_texts()) + _define("spread", text_of(replicas.spread()) + "\n")
    config = load_one("config.yaml", TEXTS=YamlBlock('include "vllm-watch.config" .'))
    runs = _POLICIES["vllm-watch-closed"]
    yield "config.yaml", several([(runs, _in_release(config))])
    gateway = load("gateway.yaml", **_words())
    yield "gateway.yaml", several(_gateways(gateway))
    alone = running.sidecar_of(deepcopy(gateway))
    yield "sidecar.yaml", several([(_ALONE, _in_release(each)) for each in _running(alone)])
    arguments = running.board_arguments(
        Expr('include "vllm-watch.prometheus" .'), [Expr('(urlParse (include "vllm-watch.runbooks" .)).hostname')]
    )
    board = load("board.yaml", **_words(), ARGUMENTS=arguments)
    yield "board.yaml", several([(".Values.board.enabled", _in_release(each)) for each in _running(board)])
    network = {each["metadata"]["name"]: _in_release(each) for each in load("network.yaml", **_words())}
    yield "network.yaml", several([(condition, network[name]) for name, condition in _POLICIES.items()])
    yield "monitors.yaml", '{{- include "vllm-watch.check" . }}\n' + several(_monitors(wanted))
    yield "rules.yaml", _each("rules", "files/rules/*.yaml", ".yaml", _rule())
    dashboards = '(printf "files/dashboards/%s/*.json" (include "vllm-watch.profile" .))'
    yield "dashboards.yaml", _each("dashboards", dashboards, ".json", _dashboard())
    yield "alertmanagerconfig.yaml", several([(".Values.alertmanagerConfig.receiver", _routes(wanted))])
    yield (
        "extra.yaml",
        '{{- range .Values.extraObjects }}\n---\n{{ include "vllm-watch.extra" (list $ .) }}\n{{- end }}\n',
    )


def _define(name: str, text: str) -> str:
    return f'{{{{- define "vllm-watch.{name}" -}}}}\n{text}{{{{- end }}}}\n'


def _gateways(gateway: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yield the objects of one gateway, of several, and of what these share, each with its condition."""
    count = When(f"not ({_SCALED})", Expr(".Values.gateway.replicas | int"))
    valkey = replicas.valkey(Expr(".Values.store.valkey.image | quote"), _words()["STORE_SECRET"])
    scaled = {
        name: Expr(f".Values.gateway.{path} | int")
        for name, path in (("least", "replicas"), ("most", "autoscaling.maxReplicas"))
    }
    scaler = replicas.autoscaler(streams=Expr(".Values.gateway.autoscaling.streams | int | quote"), **scaled)
    for condition, objects in (
        (_ONE_GATEWAY, gateway),
        (_SEVERAL, replicas.replicated(gateway, count)),
        (_VALKEY, valkey),
        (_SCALED, [scaler]),
    ):
        yield from ((condition, _in_release(each)) for each in _running(objects))


def _words() -> dict[str, Any]:
    """Return the expression of each $WORD of the objects."""
    return {
        "IMAGE": Expr('include "vllm-watch.image" . | quote'),
        "CONFIG_DIGEST": Expr('include "vllm-watch.config" . | sha256sum | trunc 16 | quote'),
        "GRACE_S": running.GRACE_S,
        "SCHEME": When(_SECRETS["tls"], "HTTPS"),
        "TEAMS_SECRET": Expr(".Values.gateway.existingSecret | quote"),
        "TLS_SECRET": Expr(f"{_SECRETS['tls']} | quote"),
        "LOGIN_SECRET": Expr(f"{_SECRETS['login']} | quote"),
        "STORE_SECRET": Expr(f"{_SECRETS['store']} | quote"),
        "SHIP_SECRET": Expr(f"{_SECRETS['ship']} | quote"),
        "SHIP_EGRESS": When(_IN_STORE, [policies.to_store(Expr('include "vllm-watch.shipPort" .'))]),
        "STORE_PEERS": When(_VALKEY, policies.STORE_PEERS),
        "STORE_PORT": Expr('include "vllm-watch.storePort" .'),
        "STORAGE_CLASS": When(".Values.state.storageClass", Expr(".Values.state.storageClass | quote")),
        "STATE_SIZE": Expr(".Values.state.size | quote"),
        "MONITORING": Expr(".Values.monitoring.namespace | quote"),
        "PROMETHEUS_PORT": Expr('include "vllm-watch.prometheusPort" .'),
        "ENGINE_PODS": YamlBlock('include "vllm-watch.enginePods" .'),
        "ENGINE_PORT": Expr("toJson .Values.engines.port"),
        "GATEWAY_PODS": {"app.kubernetes.io/name": GATEWAY},
    }


def _config_texts() -> str:
    """Return the data of the ConfigMap, each text a template of YAML."""
    web = When("or .Values.tls.existingSecret .Values.login.existingSecret", running.WEB)
    logs = When(".Values.gateway.enabled", [running.LOG])
    sidecar = running.sidecar_settings(logs, YamlBlock("toYaml .Values.engines.endpoints"), web) | _of_sidecars(web)
    sidecar["settings"] = Lines('include "vllm-watch.lines" .Values.sidecar.settings')
    upstream = When(_ONE_ENGINE, Expr("(first .Values.engines.endpoints).url | quote"))
    gateway = running.gateway_settings(upstream, web) | _of_several()
    of_web = {
        "tls_server_config": When(_SECRETS["tls"], running.TLS),
        "bearer_token_files": When(_SECRETS["login"], running.LOGIN),
    }
    of_peers = {
        "tls_config": When(_SECRETS["tls"], running.PEERS_TLS),
        "authorization": When(_SECRETS["login"], running.PEERS_LOGIN),
    }
    texts = (
        ("", "thresholds.yml", '{{ .Files.Get "files/thresholds.yml" | indent 2 }}'),
        (_SIDECAR, "sidecar.yaml", text_of(sidecar, 2)),
        (f"and ({_SIDECAR}) ({web.condition})", "web.yml", text_of(of_web, 2)),
        (f"and ({_SEVERAL}) ({web.condition})", "peers.yml", text_of(of_peers, 2)),
        (".Values.gateway.enabled", "gateway.yaml", text_of(gateway, 2)),
        (_SHIPS, "ship.yaml", text_of(_ship_settings(web), 2)),
    )
    return "".join(
        f"{{{{- if {condition} }}}}\n{name}: |\n{text}\n{{{{- end }}}}\n" if condition else f"{name}: |\n{text}\n"
        for condition, name, text in texts
    )


def _of_sidecars(web: When) -> Object:
    """Return what sidecar.yaml of several gateways has more."""
    plain, secure = (replicas.peers_url(scheme) for scheme in ("http", "https"))
    url = Expr(f'ternary "{secure}" "{plain}" (not (empty {_SECRETS["tls"]})) | quote')
    more = replicas.sidecar_settings(url, When(web.condition, running.PEERS))
    return {name: When(_SEVERAL, part) for name, part in more.items()}


def _of_several() -> Object:
    """Return what gateway.yaml of several gateways has more."""
    secret = _SECRETS["store"]
    store = {
        "url": Expr(f"{_STORE} | quote"),
        "user": When('include "vllm-watch.storeUser" .', Expr('include "vllm-watch.storeUser" . | quote')),
        "password_file": When(secret, f"{STORE_FOLDER}/password"),
        "ca_file": When(f'and {secret} (regexMatch "^(rediss|valkeys):" .Values.store.url)', f"{STORE_FOLDER}/ca.crt"),
        "fleet": Expr(".Release.Namespace | quote"),
    }
    return {name: When(_SEVERAL, part) for name, part in replicas.settings(When(_STORE, store)).items()}


def _ship_settings(web: When) -> Object:
    """Return the content of ship.yaml."""
    one, several = (running.SHIP_WRITERS[is_several] for is_several in (False, True))
    access = {
        "endpoint": When(".Values.ship.endpoint", Expr(".Values.ship.endpoint | quote")),
        "region": Expr(".Values.ship.region | quote"),
        "credentials_file": When(_SECRETS["ship"], CREDENTIALS),
    }
    return running.ship_settings(
        Expr(f'ternary "{running.DATASET}" {_SHIPS} (eq {_SHIPS} "{VOLUME}") | quote'),
        Expr(".Values.cluster | default .Release.Namespace | quote"),
        Expr(f'ternary "{several}" "{one}" (not (empty ({_SEVERAL}))) | quote'),
        When(_IN_STORE, access),
        web,
    )


def _in_release(made: Object, operator: bool = False) -> Object:
    """Return an object with the namespace, labels and annotations of the release. operator: with the labels by which
    the Prometheus Operator selects, too."""
    metadata = made["metadata"]
    helper = "operatorLabels" if operator else "labels"
    labels = {**metadata["labels"], "more": Lines(f'include "vllm-watch.{helper}" $')}
    annotations: Any = When("$.Values.commonAnnotations", YamlBlock("toYaml $.Values.commonAnnotations"))
    if own := metadata.get("annotations"):
        annotations = {**own, "more": Lines('include "vllm-watch.lines" $.Values.commonAnnotations')}
    own_metadata = {"namespace": Expr("$.Release.Namespace | quote"), "labels": labels, "annotations": annotations}
    return {**made, "metadata": {**metadata, **own_metadata}}


def _running(objects: list[Object]) -> Iterator[Object]:
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet"):
            yield _workload(each)
        elif each["kind"] == "Service":
            yield {**each, "spec": {**each["spec"], "ports": _if_shipped(each["spec"]["ports"])}}
        else:
            yield each


def _workload(made: Object) -> Object:
    """Return a Deployment or StatefulSet whose pods take the options of `pod`, `resources` and the secrets."""
    made = deepcopy(made)
    metadata, pod = made["spec"]["template"]["metadata"], made["spec"]["template"]["spec"]
    for what in ("labels", "annotations"):
        metadata[what]["more"] = Lines(f'include "vllm-watch.lines" .Values.pod.{what}')
    spread = "topologySpreadConstraints" in pod
    pod |= {name: When(f".Values.pod.{name}", YamlBlock(f"toYaml .Values.pod.{name}")) for name in _OF_PODS}
    if spread:
        own = "toYaml .Values.pod.topologySpreadConstraints"
        pod["topologySpreadConstraints"] = YamlBlock(
            f'ternary ({own}) (include "vllm-watch.spread" .) (not (empty .Values.pod.topologySpreadConstraints))'
        )
    for name in ("priorityClassName", "serviceAccountName"):
        pod[name] = When(f".Values.pod.{name}", Expr(f".Values.pod.{name} | quote"))
    pod["securityContext"] = YamlBlock("toYaml .Values.pod.securityContext")
    pod["volumes"] = _if_named(pod["volumes"])
    for container in pod["containers"]:
        container["resources"] = YamlBlock(f"toYaml .Values.resources.{container['name']}")
        container["imagePullPolicy"] = When(".Values.image.pullPolicy", Expr(".Values.image.pullPolicy"))
        container["volumeMounts"] = _if_named(container["volumeMounts"])
    pod["containers"] = _if_shipped(pod["containers"])
    return made


def _if_shipped(parts: list[Object]) -> list[Any]:
    """Return containers or ports, that of the shipper under the condition that there is a data set."""
    return [When(_SHIPS, each) if each["name"] == "ship" else each for each in parts]


def _if_named(volumes: list[Object]) -> list[Any]:
    """Return volumes or their mounts, those of secrets under the condition that the secret has a name."""
    return [When(_SECRETS[each["name"]], each) if each["name"] in _SECRETS else each for each in volumes]


def _monitors(wanted: KubernetesOptions) -> Iterator[tuple[str, Object]]:
    jobs = wanted.jobs
    cluster = When(".Values.cluster", monitoring.cluster_label(Expr(".Values.cluster | quote")))
    job, role = (
        f'{{{{ regexReplaceAll "[^A-Za-z0-9_]" .Values.engines.{name} "_" }}}}' for name in ("jobLabel", "roleLabel")
    )
    named = 'kindIs "string" .Values.engines.port'
    words = {
        **_words(),
        "ENGINE_PORT_NAME": When(named, Expr(".Values.engines.port")),
        "ENGINE_PORT_NUMBER": When(f"not ({named})", Expr(".Values.engines.port | int")),
        "ENGINE_SCHEME": When('include "vllm-watch.enginesSpeakTLS" .', "https"),
        "UNREAD": fleet.CREATED,
        "INTERVAL": Expr(".Values.interval | quote"),
        "LABELS_ENGINE": [
            *monitoring.target_labels(jobs.engine),
            cluster,
            When(".Values.engines.jobLabel", monitoring.job_by_label(jobs.engine, job)),
            When(".Values.engines.roleLabel", monitoring.role_by_label(role)),
        ],
        "LABELS_GATEWAY": [*monitoring.target_labels(jobs.gateway), cluster],
        "LABELS_SIDECAR": [*monitoring.target_labels(jobs.sidecar), cluster],
        "LABELS_SHIP": [*monitoring.target_labels(monitoring.SHIP_JOB), cluster],
        "SCHEME": When(_SECRETS["tls"], "https"),
        "TLS": When(_SECRETS["tls"], monitoring.tls(Expr(f"{_SECRETS['tls']} | quote"))),
        "LOGIN": When(_SECRETS["login"], monitoring.login(Expr(f"{_SECRETS['login']} | quote"))),
    }
    for kind in ("engine", "gateway", "sidecar"):
        limit = f".Values.sampleLimits.{kind}"
        words[f"SAMPLES_{kind.upper()}"] = When(limit, Expr(f"{limit} | int"))
    conditions = {
        "vllm-watch-gateway": ".Values.gateway.enabled", "vllm-watch-sidecar": _SIDECAR, "vllm-watch-ship": _SHIPS,
    }  # fmt: skip
    for made in load("monitors.yaml", **words):
        yield conditions.get(made["metadata"]["name"], ""), _in_release(made, operator=True)


def _each(part: str, pattern: str, suffix: str, made: Object) -> str:
    """Return a template with an object for each file of a pattern."""
    glob = pattern if pattern.startswith("(") else f'"{pattern}"'
    lines = (
        f"{{{{- if .Values.{part}.enabled }}}}",
        f"{{{{- range $path, $_ := .Files.Glob {glob} }}}}",
        f'{{{{- $name := base $path | trimSuffix "{suffix}" }}}}',
        f"---\n{text_of(made)}",
        "{{- end }}",
        "{{- end }}\n",
    )
    return "\n".join(lines)


def _rule() -> Object:
    groups = YamlBlock('include "vllm-watch.file" (list $ $path)')
    return _in_release(load_one("rule.yaml", NAME=Expr('printf "vllm-watch-%s" $name'), GROUPS=groups), operator=True)


def _dashboard() -> Object:
    key = '{{ printf "vllm-watch-%s.json" $name }}'
    texts = {key: Expr('include "vllm-watch.file" (list $ $path) | toJson')}
    made = load_one("dashboard.yaml", NAME=Expr('printf "vllm-watch-board-%s" $name'), FOLDER=OMIT, TEXTS=texts)
    metadata = made["metadata"]
    del metadata["labels"]["grafana_dashboard"]
    made = _in_release(made)
    made["metadata"]["labels"]["grafana"] = Lines('include "vllm-watch.lines" $.Values.dashboards.labels')
    annotations = "merge (deepCopy $.Values.dashboards.annotations) $.Values.commonAnnotations"
    made["metadata"]["annotations"] = YamlBlock(f"toYaml ({annotations})")
    return made


def _routes(wanted: KubernetesOptions) -> Object:
    made = notifications.alertmanager_config(replace(wanted, routes="none"))
    secret = f'replace "{wanted.routes_secret}" .Values.alertmanagerConfig.existingSecret'
    spec = YamlBlock(f'.Files.Get (printf "files/routes/%s.yaml" .Values.alertmanagerConfig.receiver) | {secret}')
    return _in_release({**made, "spec": spec}, operator=True)


def _containers() -> dict[str, Any]:
    """Return the resources of each container."""
    pods = [load(name, **_words(), ARGUMENTS=[])[0] for name in ("gateway.yaml", "board.yaml")]
    pods += replicas.valkey("", "")[:1]
    return {one["name"]: one["resources"] for pod in pods for one in pod["spec"]["template"]["spec"]["containers"]}


def _security() -> Object:
    """Return the securityContext of the pods."""
    found: Object = load("board.yaml", **_words(), ARGUMENTS=[])[0]["spec"]["template"]["spec"]["securityContext"]
    return found
