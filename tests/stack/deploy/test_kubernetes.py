"""`vllm-watch kubernetes export`: objects that Kubernetes and the Prometheus Operator declare, tied together rightly,
and what is in them runs."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import http.server
import itertools
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result

from alerts import export, printer, routing, thresholds
from alerts.rules import Links
from alerts.settings import Overrides, Settings
from dashboards import variables
from dashboards.registry import BOARDS
from exporters.catalogue import EVERYTHING, promql
from exporters.dataset.ship_config import ShipConfig
from exporters.net.http_client import HttpConfig
from exporters.sidecar_config import SidecarConfig
from stack import cli, config
from stack.board import server as board_server
from stack.deploy.fleet import budget
from stack.deploy.fleet import files as fleet
from stack.deploy.kubernetes import files, monitoring, notifications, policies, replicas, running, sidecar_patch
from stack.deploy.kubernetes import objects as kubernetes_objects
from stack.deploy.kubernetes.objects import BOARD, BOARD_SERVICE, GATEWAY, PORTS, SIDECAR_NAME
from stack.deploy.kubernetes.options import LEAST_SHIP_BYTES, LEAST_STATE_BYTES, ONCE, KubernetesOptions, OwnGateway
from stack.deploy.kubernetes.replica_options import ReplicaOptions
from stack.deploy.kubernetes.ship_options import ShipOptions
from stack.gateway import teams
from stack.gateway.config import GatewayConfig, Timeouts
from stack.gateway.lease_client import RIGHTS, LeaseClient, LeaseStore, StoreLost
from stack.gateway.lease_store import QUEUE, SLOTS, LeaseRequest, LimitClaim
from stack.lab.install import operator_schema
from tests.support import fake_kubernetes
from tests.support.wait import eventually

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "tests/golden/0.32.0-before.prom"
LINKS = Links("https://wiki.example.org/runbooks", "https://grafana.example.org")
OBSERVED = KubernetesOptions(image="vllm-watch:0.1.0", rules=export.AlertOptions(links=LINKS))
USUAL = replace(OBSERVED, gateway=True, board=True, restrict_engines=True)
MUCH = replace(
    USUAL, image="registry.example.org:5000/team/vllm-watch:1",
    engines=("http://vllm-0.vllm:8000", "http://vllm-1.vllm:8000"), engine_port="http",
    engine_selector=(("app.kubernetes.io/name", "vllm"), ("model", "qwen")), operator_labels=(("release", "kps"),),
    cluster="east", interval="1s",
    sample_limit=5000, storage_class="fast", tls_secret="watch-tls", login_secret="watch-login",
    job_label="llm.example.org/model", state_size="2Gi",
    shipping=ShipOptions(dataset="s3://logs/vllm", endpoint="https://s3.example.org:9000", secret="watch-ship"),
)  # fmt: skip
EITHER = replace(
    USUAL, without=ONCE, engine_selector=(("app", "chat"), ("app", "embed"), ("tier", "gpu"), ("app", "chat"))
)
ROUTED = replace(OBSERVED, routes="slack", without=ONCE)
BESIDE = replace(
    MUCH, gateway=False, shipping=ShipOptions(), own_gateway=OwnGateway("my-gateway", "logs", "out/requests.jsonl")
)
ALONE = replace(OBSERVED, sidecar=True)
SEVERAL = replace(USUAL, without=ONCE, gateways=ReplicaOptions(count=3))
LEASED = replace(
    MUCH, without=ONCE,
    gateways=ReplicaOptions(count=2, most=6, streams=150, valkey=True, store_secret="watch-store"),
)  # fmt: skip
VARIANTS = {
    "usual": USUAL, "observed": OBSERVED, "alone": ALONE, "much": MUCH, "leased": LEASED,
}  # fmt: skip
each_variant = pytest.mark.parametrize("wanted", VARIANTS.values(), ids=VARIANTS)
CORE = ("1.27.0", "1.37.0")
MONITORING = ("monitoring.coreos.com/v1", "monitoring.coreos.com/v1alpha1")
LIMIT_BYTES = 1 << 20
CLIENT_SIDE_BYTES = 262_144  # all annotations together; `kubectl apply` without --server-side keeps the object in one


@functools.cache
def printed(wanted: KubernetesOptions) -> dict[str, str]:
    return files.files(wanted)


@functools.cache
def objects(wanted: KubernetesOptions) -> list[dict[str, Any]]:
    """Every object of the base; read, never changed."""
    texts = [
        text
        for name, text in printed(wanted).items()
        if name.startswith("base/") and not name.endswith("kustomization.yaml")
    ]
    return [each for text in texts for each in yaml.load_all(text, yaml.CSafeLoader)]


def of_kind(found: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in found if each["kind"] == kind}


def pods(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pod templates by the name of their Deployment or StatefulSet."""
    return {name: each["spec"]["template"] for name, each in workloads(found).items()}


def workloads(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return of_kind(found, "Deployment") | of_kind(found, "StatefulSet")


def operators(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in found if each["apiVersion"] in MONITORING]


# ---- the files of the base


def words_in(text: str) -> set[str]:
    """Scalars that are a $WORD and nothing else."""
    scalars = (token.value for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken))
    return {value[1:] for value in scalars if re.fullmatch(r"\$[A-Z_]+", value)}


@pytest.fixture(scope="module")
def words_used() -> dict[str, set[str]]:
    """Words that are filled in for each file of the base; none is left in what is exported."""
    printed.cache_clear()  # every export is made here, and read by the tests that follow
    used: dict[str, set[str]] = {}
    real = kubernetes_objects.load

    def recorded(name: str, **words: Any) -> list[dict[str, Any]]:
        used.setdefault(name, set()).update(words)
        return real(name, **words)

    with pytest.MonkeyPatch.context() as patch:
        for module in (
            kubernetes_objects, files, monitoring, notifications, policies, replicas, running, sidecar_patch,
        ):  # fmt: skip
            patch.setattr(module, "load", recorded, raising=False)
        exports = [printed(wanted) for wanted in (*VARIANTS.values(), BESIDE, ROUTED)]
    texts = {text for export in exports for text in export.values() if re.search(r"\$[A-Z_]+\b", text)}
    assert not any(words_in(text) for text in texts)
    return used


@pytest.mark.parametrize("path", sorted((ROOT / "stack/deploy/kubernetes/base").glob("*.yaml")), ids=lambda p: p.name)
def test_every_word_of_the_base_files_is_filled_in(path, words_used):
    """A $WORD that nothing fills would reach the cluster as text, and a value that no file has is dead."""
    assert words_used[path.name] == words_in(path.read_text())


def test_a_word_without_a_value_is_refused():
    with pytest.raises(KeyError, match="TEXTS"):
        kubernetes_objects.load_one("config.yaml")


# ---- schemas


def core_mistakes(found: list[dict[str, Any]], version: str) -> list[str]:
    """What Kubernetes' own schemas say, unknown fields included; objects of the operator are not theirs."""
    said = []
    for each in found:
        if each["apiVersion"] not in MONITORING:
            try:
                kubernetes_validate.validate(each, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                said.append(f"{each['kind']} {each['metadata']['name']}: {error.message}")
    return said


@pytest.mark.parametrize("version", CORE)
def test_objects_are_what_kubernetes_declares(version):
    different = {json.dumps(each): each for wanted in VARIANTS.values() for each in objects(wanted)}
    assert [] == core_mistakes(list(different.values()), version)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.update(replcas=1),
        lambda spec: spec.update(replicas="one"),
        lambda spec: spec["template"]["spec"]["containers"][0].update(volumeMount=[]),
        lambda spec: spec["template"]["spec"]["containers"][0]["ports"][0].pop("containerPort"),
        lambda spec: spec["template"]["spec"]["securityContext"].update(runAsUser="10001"),
    ],
)
def test_an_object_that_kubernetes_would_refuse_does_not_pass(spoil):
    wrong = copy.deepcopy(of_kind(objects(USUAL), "Deployment")[GATEWAY])
    spoil(wrong["spec"])
    assert 1 == len(core_mistakes([wrong], CORE[-1]))


def operator_mistakes(found: list[dict[str, Any]], part: Any, tmp_path: Path) -> list[str]:
    """What the operator's validators say of values, and its types of unknown fields, which validators let pass."""
    folder, node = part("operator-schema").path, part("node").path
    command = [node, ROOT / "tests/support/operator_check.mjs", operator_schema.schemas(folder)]
    done = subprocess.run(command, input=json.dumps(found), capture_output=True, text=True, check=True, timeout=60)
    kinds = sorted({each["kind"] for each in found})
    versions = {each["kind"]: each["apiVersion"] for each in found}
    imports = [
        f"import type {{ I{kind} }} from '@kubernetes-models/prometheus-operator/{versions[kind]}/{kind}';"
        for kind in kinds
    ]
    rows = [*imports, *(f"const o{at}: I{each['kind']} = {json.dumps(each)};" for at, each in enumerate(found))]
    work = tmp_path / "types"
    work.mkdir()
    (work / "node_modules").symlink_to(folder / "node_modules")
    (work / "objects.ts").write_text("\n".join(rows))
    settings = {
        "strict": True,
        "noEmit": True,
        "skipLibCheck": True,
        "moduleResolution": "bundler",
        "module": "esnext",
        "target": "es2022",
        "lib": ["es2022"],
        "types": [],
    }
    (work / "tsconfig.json").write_text(json.dumps({"compilerOptions": settings, "files": ["objects.ts"]}))
    command = [node, folder / "node_modules/typescript/lib/tsc.js", "--project", work, "--pretty", "false"]
    typed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (typed.returncode == 0) == (not typed.stdout), typed.stdout + typed.stderr
    return [*json.loads(done.stdout), *typed.stdout.splitlines()]


def test_rules_and_monitors_are_what_the_operator_declares(part, tmp_path):
    """Rules are the same in each but for the label that MUCH has too."""
    others = [
        each
        for wanted in (USUAL, OBSERVED, BESIDE, EITHER, replace(USUAL, sample_limit=0))
        for each in monitoring.monitors(wanted)
    ]
    others += [notifications.alertmanager_config(replace(ROUTED, routes=receiver)) for receiver in routing.RECEIVERS]
    assert [] == operator_mistakes([*operators(objects(MUCH)), *others], part, tmp_path)


def test_what_the_operator_would_refuse_does_not_pass(part, tmp_path):
    """A wrong value is the validators' to find, an unknown field the types'."""
    monitor = of_kind(objects(USUAL), "PodMonitor")["vllm-watch-engines"]
    slow, unknown, rule = (
        copy.deepcopy(monitor),
        copy.deepcopy(monitor),
        copy.deepcopy(next(iter(of_kind(objects(USUAL), "PrometheusRule").values()))),
    )
    slow["spec"]["podMetricsEndpoints"][0]["interval"] = "soon"
    unknown["spec"]["podMetricsEndpoints"][0]["metricRelabeling"] = []
    del rule["spec"]["groups"][0]["name"]
    said = "\n".join(operator_mistakes([slow, unknown, rule], part, tmp_path))
    assert "vllm-watch-engines/spec/podMetricsEndpoints/0/interval: pattern" in said
    assert re.search(r'"metricRelabeling".*\bIPodMetricsEndpoint\b', said)
    assert "/spec/groups/0: required" in said


def test_the_operators_schemas_are_fetched_at_exact_versions():
    wanted = json.loads(operator_schema.manifest())["dependencies"].values()
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted)


@each_variant
def test_objects_fit_into_the_cluster(wanted):
    """docs/guides/kubernetes.md applies server-side; the Latency dashboard is the one object that needs it."""
    sizes = {each["metadata"]["name"]: len(json.dumps(each).encode()) for each in objects(wanted)}
    assert {} == {name: size for name, size in sizes.items() if size > LIMIT_BYTES}
    assert {"vllm-watch-board-latency"} >= {name for name, size in sizes.items() if size > CLIENT_SIDE_BYTES}


def test_large_rules_split_into_whole_groups(monkeypatch):
    """Rules too large for one object become several with every group whole."""
    monkeypatch.setattr(monitoring, "LARGEST_BYTES", 10_000)
    parts = dict(monitoring.rules(USUAL))
    tickets = [
        parts[f"ticket-{number}"]["spec"]["groups"]
        for number in range(1, 1 + sum(name.startswith("ticket-") for name in parts))
    ]
    assert len(tickets) > 1
    whole = yaml.safe_load(dict(printer.rule_files(LINKS, header=""))["ticket.yaml"])["groups"]
    assert whole == [group for groups in tickets for group in groups]


# ---- kustomize


def kustomize(kubectl: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False, timeout=60)


def kustomized(kubectl: Path, folder: Path) -> list[dict[str, Any]]:
    done = kustomize(kubectl, folder)
    assert 0 == done.returncode, done.stderr
    return list(yaml.load_all(done.stdout, yaml.CSafeLoader))


@contextmanager
def without_rules_and_boards() -> Iterator[None]:
    """They are most of an export, and the same in each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitoring, "rules", lambda wanted: ())
        patch.setattr(monitoring, "boards", lambda wanted: ())
        yield


@pytest.fixture
def few() -> Iterator[None]:
    with without_rules_and_boards():
        yield


def filed(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_base_is_every_object_in_its_namespace(part, tmp_path):
    """The base is every object in its namespace and nothing else changed."""
    found = kustomized(part("kubectl").path, filed(tmp_path, printed(USUAL)) / "base")
    assert {"vllm"} == {each["metadata"].pop("namespace") for each in found}

    def key(each):
        return (each["kind"], each["metadata"]["name"])

    assert sorted(objects(USUAL), key=key) == sorted(found, key=key)


def test_the_example_has_its_namespace_label_image_and_engine(part, tmp_path, few):
    found = kustomized(part("kubectl").path, filed(tmp_path, files.files(USUAL)) / "overlays/example")
    assert {"vllm-example"} == {each["metadata"]["namespace"] for each in found}
    assert {"example"} == {each["metadata"]["labels"]["environment"] for each in found}
    containers = [one for pod in pods(found).values() for one in pod["spec"]["containers"]]
    assert {"registry.example.org/vllm-watch:example"} == {one["image"] for one in containers}
    gateway = config.parse(
        of_kind(found, "ConfigMap")["vllm-watch-config"]["data"]["gateway.yaml"], GatewayConfig, "gateway.yaml"
    )
    assert "http://another-vllm:8000" == gateway.upstream
    assert [] == core_mistakes(found, CORE[-1])
    assert [] == mismatches(found)


@pytest.mark.parametrize("wanted", [USUAL, ALONE, ROUTED], ids=["usual", "alone", "routed"])
def test_kubectl_applies_the_base(wanted, part, tmp_path):
    """kubectl reads every object of the base, and knows where each would go."""
    with fake_kubernetes.serving() as url:
        base = filed(tmp_path, printed(wanted)) / "base"
        command = [
            part("kubectl").path,
            "--server",
            url,
            "--cache-dir",
            tmp_path / "cache",
            "apply",
            "--dry-run=client",
        ]
        done = subprocess.run(
            [*command, "--validate=false", "-k", base, "-o", "name"],
            capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "KUBECONFIG": "/dev/null"},
        )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    assert len(objects(wanted)) == len(done.stdout.split())


# ---- what belongs together


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def mismatches(found: list[dict[str, Any]]) -> list[str]:
    """Selectors that meet none of our pods or Services, named ports that these do not have, and volumes that nobody
    makes."""
    templates, services = pods(found), of_kind(found, "Service")
    said = []
    for name, each in services.items():
        met = [pod for pod in templates.values() if selects(each["spec"]["selector"], pod["metadata"]["labels"])]
        ports = {
            port["name"]: port["containerPort"]
            for pod in met
            for one in pod["spec"]["containers"]
            for port in one.get("ports", ())
        }
        said += [f"Service {name} meets {len(met)} pods"] * (len(met) != 1)
        said += [
            f"Service {name}: {port['name']}"
            for port in each["spec"]["ports"]
            if ports.get(port["targetPort"]) != port["port"]
        ]
    for name, each in of_kind(found, "ServiceMonitor").items():
        met = [
            one
            for one in services.values()
            if selects(each["spec"]["selector"]["matchLabels"], one["metadata"]["labels"])
        ]
        ports = {port["name"] for one in met for port in one["spec"]["ports"]}
        said += [f"ServiceMonitor {name}"] * (
            len(met) != 1 or not {one["port"] for one in each["spec"]["endpoints"]} <= ports
        )
    claims, maps = of_kind(found, "PersistentVolumeClaim"), of_kind(found, "ConfigMap")
    for name, pod in templates.items():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]} | {
            claim["metadata"]["name"]: claim for claim in workloads(found)[name]["spec"].get("volumeClaimTemplates", ())
        }
        mounted = {mount["name"] for one in pod["spec"]["containers"] for mount in one["volumeMounts"]}
        said += [f"Deployment {name}: {sorted(mounted ^ set(volumes))}"] * (mounted != set(volumes))
        said += [
            f"{name}: claim"
            for one in volumes.values()
            if "persistentVolumeClaim" in one and one["persistentVolumeClaim"]["claimName"] not in claims
        ]
        said += [
            f"{name}: map" for one in volumes.values() if "configMap" in one and one["configMap"]["name"] not in maps
        ]
        if not selects(workloads(found)[name]["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"]):
            said.append(f"Deployment {name} does not select its own pods")
    return said


@each_variant
def test_services_monitors_and_volumes_meet_what_they_mean(wanted):
    assert [] == mismatches(objects(wanted))


def test_a_selector_that_meets_nothing_is_found():
    wrong = copy.deepcopy(objects(USUAL))
    of_kind(wrong, "Service")["watch-metrics"]["spec"]["selector"] = {"app.kubernetes.io/name": "gateway"}
    assert "Service watch-metrics meets 0 pods" in mismatches(wrong)


@pytest.mark.parametrize("wanted", [USUAL, MUCH], ids=["usual", "much"])
def test_ports_agree_everywhere(wanted):
    """Ports are the same in configurations containers services and policies."""
    found = objects(wanted)
    data = of_kind(found, "ConfigMap")["vllm-watch-config"]["data"]
    gateway, sidecar = yaml.safe_load(data["gateway.yaml"]), yaml.safe_load(data["sidecar.yaml"])
    arguments = pods(found)[BOARD]["spec"]["containers"][0]["args"]
    listens = {"http": gateway["listen"], "gateway-metrics": gateway["metrics_listen"], "sidecar": sidecar["listen"]}
    listens["board"] = arguments[arguments.index("--listen") + 1]
    known = {name: port for name, port in PORTS.items() if name != "ship" or wanted.shipping.dataset}
    if "ship" in known:
        listens["ship"] = yaml.safe_load(data["ship.yaml"])["listen"]
    assert {name: f"0.0.0.0:{port}" for name, port in known.items()} == listens
    assert known == {
        port["name"]: port["containerPort"]
        for pod in pods(found).values()
        for one in pod["spec"]["containers"]
        for port in one.get("ports", ())
    }
    opened = of_kind(found, "NetworkPolicy")

    def into(name):
        return {port["port"] for rule in opened[name]["spec"]["ingress"] for port in rule["ports"]}

    assert {PORTS["http"], PORTS["gateway-metrics"], PORTS["sidecar"]} == into(GATEWAY)
    assert {PORTS["board"]} == into(BOARD)
    assert "ship" not in known or {PORTS["ship"]} == into("vllm-watch-gateway-ship")


@each_variant
def test_probes_ask_own_ports_by_their_scheme(wanted):
    """Probes ask ports of their own container by the scheme that it speaks."""
    for pod in pods(objects(wanted)).values():
        for one in pod["spec"]["containers"]:
            probes = [one[probe] for probe in ("livenessProbe", "readinessProbe", "startupProbe") if probe in one]
            asked = [probe["httpGet"] for probe in probes if "httpGet" in probe]
            names = {port["name"] for port in one.get("ports", ())}
            assert {get["port"] for get in asked} <= names
            secured = bool(wanted.tls_secret) and one["name"] in ("gateway", "sidecar", "ship")
            assert {"HTTPS" if secured else "HTTP"} == {get.get("scheme", "HTTP") for get in asked} or not asked


def test_policies_close_all_and_open_the_needed():
    """Policies close everything of ours and open only what is needed."""
    found = objects(MUCH)
    policies = of_kind(found, "NetworkPolicy")
    closed = policies["vllm-watch-closed"]["spec"]
    assert ([], [], ["Ingress", "Egress"]) == (closed["ingress"], closed["egress"], closed["policyTypes"])
    for pod in pods(found).values():
        assert selects(closed["podSelector"]["matchLabels"], pod["metadata"]["labels"])
    for name in (GATEWAY, BOARD):
        met = [
            one
            for one, pod in pods(found).items()
            if selects(policies[name]["spec"]["podSelector"]["matchLabels"], pod["metadata"]["labels"])
        ]
        assert [name] == met
    engines = policies["vllm-watch-engines"]["spec"]
    assert (
        dict(MUCH.engine_selector)
        == engines["podSelector"]["matchLabels"]
        == of_kind(found, "PodMonitor")["vllm-watch-engines"]["spec"]["selector"]["matchLabels"]
    )
    assert ["Ingress"] == engines["policyTypes"], (
        "what engines ask of others, such as a model hub, is not ours to forbid"
    )
    asking, among = engines["ingress"]
    assert ["http"] == [port["port"] for port in asking["ports"]]
    assert {"matchLabels": {"app.kubernetes.io/name": GATEWAY}} == asking["from"][0]["podSelector"]
    assert [{"podSelector": {"matchLabels": dict(MUCH.engine_selector)}}] == among["from"], (
        "one model over several pods talks among them"
    )


def test_names_may_be_asked_of_whoever_answers_them_in_a_cluster():
    """kube-dns by its pods, or a cache on each node: with pods of another label, at a link-local address, or at the
    address of kube-dns' Service."""
    policies = of_kind(objects(USUAL), "NetworkPolicy")
    for name in (GATEWAY, BOARD):
        assert [{"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}] == [
            rule for rule in policies[name]["spec"]["egress"] if any(port["port"] == 53 for port in rule["ports"])
        ]


def test_engines_are_closed_only_where_that_was_asked_for():
    assert "vllm-watch-engines" in of_kind(objects(USUAL), "NetworkPolicy")
    left = {
        policy["metadata"]["name"]: policy["spec"]["podSelector"]["matchLabels"]
        for policy in policies.policies(replace(USUAL, restrict_engines=False))
    }
    assert {"vllm-watch-closed", GATEWAY, BOARD} == set(left)
    assert dict(USUAL.engine_selector) not in left.values()


def test_a_repeated_key_of_the_selector_takes_any_of_its_values():
    either = {"key": "app", "operator": "In", "values": ["chat", "embed"]}
    selector = {"matchLabels": {"tier": "gpu"}, "matchExpressions": [either]}
    found = objects(EITHER)
    policies = of_kind(found, "NetworkPolicy")
    assert selector == of_kind(found, "PodMonitor")["vllm-watch-engines"]["spec"]["selector"]
    assert selector == policies["vllm-watch-engines"]["spec"]["podSelector"]
    assert [{"podSelector": selector}] in [rule.get("to") for rule in policies[GATEWAY]["spec"]["egress"]]
    assert {"matchExpressions": [either]} == replace(EITHER, engine_selector=EITHER.engine_selector[:2]).engine_pods
    assert [] == core_mistakes(found, CORE[-1])


def test_the_default_export_changes_nothing_for_clients():
    """Rules, dashboards and the engines' monitor: nothing that runs, restricts, or needs an image."""
    kinds = {(each["apiVersion"], each["kind"]) for each in objects(OBSERVED)}
    assert {(MONITORING[0], "PodMonitor"), (MONITORING[0], "PrometheusRule"), ("v1", "ConfigMap")} == kinds
    assert {"1"} == {
        each["metadata"]["labels"].get("grafana_dashboard") for each in of_kind(objects(OBSERVED), "ConfigMap").values()
    }
    assert "image" not in "".join(text for name, text in printed(OBSERVED).items() if "50-monitors" in name)
    assert ["30s"] == [
        endpoint["interval"]
        for each in of_kind(objects(OBSERVED), "PodMonitor").values()
        for endpoint in endpoints_of(each)
    ]


@pytest.mark.parametrize(
    ("changes", "effect"),
    [
        ({"gateway": True}, r"--gateway: .*\bwatch-gateway\.vllm\.svc\b"),
        ({"sidecar": True}, r"--sidecar: .*/metrics .*\b5 s\b"),
        ({"board": True}, r"--board: .*\bvllm-watch-clients=true\b"),
        ({"own_gateway": OwnGateway("my-gateway", "logs", "a")}, r"--own-gateway: .*\bmy-gateway .*\bRecreate\b"),
        (
            {"gateway": True, "restrict_engines": True},
            r"--restrict-engines: .*kubectl -n vllm .*networkpolicy vllm-watch-engines\b",
        ),
        ({"routes": "slack"}, r"--alertmanager-config: .*\bspec\.alertmanagerConfigMatcherStrategy\.type: None\b"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_part_beyond_the_default_comes_with_its_effect(changes, effect):
    assert re.search(f"^{effect}", "\n".join(files.warnings(replace(OBSERVED, **changes))), re.MULTILINE)
    assert [] == list(files.effects(OBSERVED))


def test_own_gateway_implies_the_sidecar():
    assert replace(OBSERVED, own_gateway=BESIDE.own_gateway).with_sidecar
    assert not replace(OBSERVED, own_gateway=BESIDE.own_gateway, sidecar=True).sidecar_alone


def test_a_sidecar_alone_has_no_log_and_keeps_its_state():
    found = objects(ALONE)
    [(name, pod)] = pods(found).items()
    assert (SIDECAR_NAME, ["sidecar"]) == (name, [one["name"] for one in pod["spec"]["containers"]])
    data = of_kind(found, "ConfigMap")["vllm-watch-config"]["data"]
    read = config.parse(data["sidecar.yaml"], SidecarConfig, "sidecar.yaml")
    assert ((), f"{running.STATE}/sidecar.state") == (read.requests_log, read.state)
    assert {running.STATE} <= {mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    assert ["vllm-watch-sidecar"] == list(of_kind(found, "ServiceMonitor"))
    opened = of_kind(found, "NetworkPolicy")["vllm-watch-sidecar-alone"]["spec"]
    assert selects(opened["podSelector"]["matchLabels"], pod["metadata"]["labels"])
    assert "vllm-watch-engines" not in of_kind(found, "NetworkPolicy")


def test_links_lead_to_the_board_where_nothing_else_was_given():
    with_board = KubernetesOptions(image="vllm-watch:0.1.0", board=True, namespace="llm")
    assert Links("http://watch-board.llm.svc:9402/runbooks", "http://watch-board.llm.svc:9402") == with_board.links
    assert LINKS == replace(OBSERVED, board=True).links
    with pytest.raises(ValueError, match=r"--runbook-base .*https://wiki\.example\.org.*--board"):
        KubernetesOptions(image="vllm-watch:0.1.0")
    for option, url, links in (
        ("--runbook-base", "http://localhost:1", Links("http://localhost:1", LINKS.dashboards)),
        ("--dashboard-base", "http://127.0.0.1:3000", Links(LINKS.runbooks, "http://127.0.0.1:3000")),
    ):
        with pytest.raises(ValueError, match=rf"{option} .*\({url}\)"):
            replace(OBSERVED, rules=export.AlertOptions(links=links))
    assert KubernetesOptions(image="vllm-watch:0.1.0", without=ONCE), "without rules and dashboards there is no link"


@each_variant
def test_no_service_puts_a_variable_of_vllm_into_the_engines(wanted):
    """Kubernetes makes NAME_SERVICE_HOST and more of each Service; vLLM warns of every VLLM_ that it does not know, or
    does not start."""
    assert [] == [
        name for name in of_kind(objects(wanted), "Service") if name.upper().replace("-", "_").startswith("VLLM_")
    ]


@each_variant
def test_names_labels_and_ports_are_short_enough(wanted):
    """Schemas do not say it: names are DNS labels, values of labels 63 characters, names of ports 15."""
    for each in objects(wanted):
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", each["metadata"]["name"])
        assert all(len(value) <= 63 for value in each["metadata"]["labels"].values())
    assert all(len(name) <= 15 for name in PORTS)


@each_variant
def test_pods_are_restricted_and_get_no_token(wanted):
    """The rules of Kubernetes' profile `restricted`, and a root that cannot be written."""
    for pod in pods(objects(wanted)).values():
        spec = pod["spec"]
        own = spec["securityContext"]
        assert (True, 10001, "RuntimeDefault") == (own["runAsNonRoot"], own["runAsUser"], own["seccompProfile"]["type"])
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert {"configMap", "secret", "emptyDir", "persistentVolumeClaim"} >= {
            kind for volume in spec["volumes"] for kind in volume if kind != "name"
        }
        for one in spec["containers"]:
            assert {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            } == one["securityContext"]
            assert one["resources"]["limits"]["memory"]


def test_the_user_of_the_pods_is_that_of_the_image():
    image = (ROOT / "Dockerfile").read_text()
    for template in pods(objects(USUAL)).values():
        user = template["spec"]["securityContext"]
        assert f"USER {user['runAsUser']}:" in image
        assert user["runAsUser"] == user["runAsGroup"] == user["fsGroup"]


def test_gateway_has_one_pod_and_time_to_end():
    """A gateway has one pod and more time to end than its requests."""
    spec = of_kind(objects(USUAL), "Deployment")[GATEWAY]["spec"]
    assert (1, {"type": "Recreate"}) == (spec["replicas"], spec["strategy"])
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > Timeouts().drain_s


def test_nodes_and_rollouts_take_one_gateway_at_a_time():
    found = objects(SEVERAL)
    several = of_kind(found, "StatefulSet")[GATEWAY]["spec"]
    assert (3, {"type": "RollingUpdate"}) == (several["replicas"], several["updateStrategy"])
    budget = of_kind(found, "PodDisruptionBudget")[GATEWAY]["spec"]
    assert (1, several["selector"]) == (budget["maxUnavailable"], budget["selector"])
    pod = several["template"]["spec"]
    assert {"kubernetes.io/hostname", "topology.kubernetes.io/zone"} == {
        each["topologyKey"] for each in pod["topologySpreadConstraints"]
    }
    assert all(
        each["labelSelector"] == several["selector"] and each["whenUnsatisfiable"] == "ScheduleAnyway"
        for each in pod["topologySpreadConstraints"]
    )
    assert "replicas" not in of_kind(objects(LEASED), "StatefulSet")[GATEWAY]["spec"], "the autoscaler has it"
    assert not {"Deployment", "PersistentVolumeClaim"} & {
        each["kind"] for each in found if each["metadata"]["name"].startswith(GATEWAY)
    }


def test_the_first_sidecar_compares_the_engines_with_all_logs():
    """It asks every pod by the headless Service, with the login and the name in the certificate of each."""
    for wanted in (SEVERAL, LEASED):
        found = objects(wanted)
        data = of_kind(found, "ConfigMap")["vllm-watch-config"]["data"]
        sidecar = config.parse(data["sidecar.yaml"], SidecarConfig, "sidecar.yaml")
        assert sidecar.on(f"{GATEWAY}-0").engines
        assert not sidecar.on(f"{GATEWAY}-1").engines
        (peer,) = sidecar.peers
        url = urllib.parse.urlsplit(peer.url)
        assert ("https" if wanted.tls_secret else "http", PORTS["sidecar"]) == (url.scheme, url.port)
        assert of_kind(found, "Service")[url.hostname]["spec"]["publishNotReadyAddresses"]
        assert (peer.http_config is not None) == bool(wanted.secrets)
        if peer.http_config:
            asked = config.parse(data[Path(peer.http_config).name], HttpConfig, "peers.yml")
            assert asked.tls_config is not None
            assert asked.authorization is not None
            assert "watch-metrics" == asked.tls_config.server_name


def test_a_gateway_that_ends_is_drained_and_its_log_is_read(tmp_path, free_port):
    """It serves until its Services have lost its pod; the sidecar ends when the gateway's metrics port is closed."""
    found = objects(SEVERAL)
    several = of_kind(found, "StatefulSet")[GATEWAY]["spec"]
    pod = several["template"]["spec"]
    containers = {each["name"]: each for each in pod["containers"]}
    text = of_kind(found, "ConfigMap")["vllm-watch-config"]["data"]["gateway.yaml"]
    grace = config.parse(text, GatewayConfig, "gateway.yaml").timeouts.accept_grace_s
    assert grace == replicas.LEAVE_S
    assert pod["terminationGracePeriodSeconds"] > Timeouts().drain_s + grace
    services = of_kind(found, "Service")
    assert {"watch-gateway": False, "watch-metrics": True, several["serviceName"]: True, "watch-board": True} == {
        name: each["spec"].get("publishNotReadyAddresses", False) for name, each in services.items()
    }
    port = free_port()
    waits = containers["sidecar"]["lifecycle"]["preStop"]["exec"]["command"]
    waits = [word.replace(str(PORTS["gateway-metrics"]), str(port)) for word in waits]
    assert "sleep 3" in waits[-1], "the log's last lines are read"
    waits = [re.sub(r"sleep \d+", "sleep 0.05", word) for word in waits]
    with socket.create_server(("127.0.0.1", port)) as gateway:
        shell = subprocess.Popen(waits, env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
        with contextlib.closing(gateway.accept()[0]):
            assert shell.poll() is None
    assert 0 == shell.wait(60)


def test_shared_limits_are_configured_as_the_gateway_reads_them(tmp_path):
    """Fixed shares by the headless Service, and leases of either store with files that the container mounts."""
    stores = {
        "fixed": ReplicaOptions(count=3),
        "valkey": LEASED.gateways,
        "tls": ReplicaOptions(count=2, store="rediss://redis.example:6380/1", store_user="llm", store_secret="redis"),
    }
    for name, gateways in stores.items():
        found = objects(replace(LEASED, gateways=gateways))
        text = of_kind(found, "ConfigMap")["vllm-watch-config"]["data"]["gateway.yaml"]
        sharing = config.parse(text, GatewayConfig, "gateway.yaml").sharing
        assert sharing is not None
        headless = of_kind(found, "Service")[sharing.replicas_dns]["spec"]
        assert ("None", True) == (headless["clusterIP"], headless["publishNotReadyAddresses"])
        store = sharing.store
        assert (store is None) == (name == "fixed")
        if store is None:
            continue
        assert LEASED.namespace == store.fleet
        [gateway] = [each for each in pods(found)[GATEWAY]["spec"]["containers"] if each["name"] == "gateway"]
        folders = {mount["mountPath"] for mount in gateway["volumeMounts"]}
        assert {str(Path(path).parent) for path in (store.password_file, store.ca_file) if path} <= folders
        assert (name == "tls") == (store.ca_file is not None)
        opened = [
            port["port"]
            for policy in of_kind(found, "NetworkPolicy").values()
            if policy["spec"]["podSelector"].get("matchLabels") == {"app.kubernetes.io/name": GATEWAY}
            for rule in policy["spec"].get("egress", ())
            for port in rule["ports"]
        ]
        assert store.address[1] in opened


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_the_store_of_the_export_leases_to_its_user_only(part, tmp_path, free_port):
    """The script of its container with a real Valkey: its one user may lease, and the password is in no command."""
    [container] = pods(objects(LEASED))["vllm-watch-store"]["spec"]["containers"]
    port, password = free_port(), "a 'password' with $signs and #"
    (tmp_path / "password").write_text(f"{password}\n")
    script = container["args"][0].replace("/run/store", str(tmp_path)).replace("port 6379", f"port {port}")
    script = f"PATH={part('valkey').path.parent}:$PATH\n{script}"
    store = LeaseStore(url=f"valkey://127.0.0.1:{port}", user="gateway", password_file="password", fleet="vllm")
    limit = LimitClaim(use=0, keep=0, demand=0, limit=8)

    def leased(word: str | None) -> str:
        async def call() -> str:
            client = LeaseClient(store, None, lambda: word, call_s=30)
            try:
                await client.connect()
                request = LeaseRequest(
                    name="a", incarnation="i", sequence=1, epoch=0, run=client.run, ttl_ms=2000, linger_ms=0,
                    policy="p", claims={SLOTS: limit, QUEUE: limit}, teams=[],
                )  # fmt: skip
                return (await client.renew(request)).state
            finally:
                client.abort()

        return asyncio.run(call())

    with process(*container["command"], script, log=tmp_path / "store.log") as started:
        eventually(lambda: accepts(port), what="the store's port")
        assert "ok" == leased(password)
        for wrong, sentence in (("wrong", "password or the user is wrong"), (None, "wants a password")):
            with pytest.raises(StoreLost, match=sentence):
                leased(wrong)
        assert password not in Path(f"/proc/{started.pid}/cmdline").read_text()
    (tmp_path / "password").write_text("\n")
    refused = subprocess.run([*container["command"], script], capture_output=True, text=True, check=False)
    assert (1, True) == (refused.returncode, "password is empty" in refused.stderr)
    assert RIGHTS in script


def test_the_gateway_has_memory_for_the_bodies_that_it_may_hold():
    """128 MiB of bodies were measured at three times that in memory."""
    held = {one["name"]: one["resources"] for one in pods(objects(USUAL))[GATEWAY]["spec"]["containers"]}
    assert {"gateway": "1Gi", "sidecar": "512Mi", "rotate": "32Mi"} == {
        name: each["limits"]["memory"] for name, each in held.items()
    }
    assert {"cpu": "100m", "memory": "128Mi"} == held["gateway"]["requests"]


@each_variant
def test_no_secret_is_written_and_teams_come_from_one_by_name(wanted):
    assert {} == of_kind(objects(wanted), "Secret")
    if wanted.gateway:
        volumes = pods(objects(wanted))[GATEWAY]["spec"]["volumes"]
        assert [wanted.teams_secret] == [
            volume["secret"]["secretName"] for volume in volumes if volume["name"] == "teams"
        ]


def test_a_change_of_the_configuration_makes_new_pods():
    digests = {
        pod["metadata"]["annotations"]["checksum/vllm-watch-config"]
        for wanted in (USUAL, replace(USUAL, engines=("http://b:1",)))
        for pod in pods([*running.gateway(wanted), *running.board(wanted)]).values()
    }
    assert 2 == len(digests)


def test_labels_that_scraping_adds_are_none_of_ours_or_of_vllm():
    """Prometheus would rename ours to exported_*, and every panel that reads them would be empty."""
    added = {"namespace", "pod", "container", "endpoint", "service", "job", "node", "cluster", "instance"}
    clashes = {
        (metric.name, label)
        for metric in EVERYTHING
        if metric.name.startswith("vllm")
        for label in metric.labels
        if label in added
    }
    assert set() == clashes


# ---- a gateway of somebody else's

THEIRS = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: my-gateway, namespace: vllm, labels: {app: my-gateway}}
spec:
  strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 1}}
  selector: {matchLabels: {app: my-gateway}}
  template:
    metadata: {labels: {app: my-gateway}}
    spec:
      containers:
        - {name: proxy, image: "proxy:1", ports: [{name: http, containerPort: 80}], volumeMounts: [{name: logs, mountPath: /logs}]}
      volumes: [{name: logs, emptyDir: {}}]
"""  # noqa: E501


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The overlay of docs/guides/kubernetes.md over an export and somebody's Deployment."""
    folder = tmp_path_factory.mktemp("beside")
    with without_rules_and_boards():
        filed(folder / "manifests", files.files(BESIDE))
    filed(folder / "my-gateway", {"deployment.yaml": THEIRS, "kustomization.yaml": "resources: [deployment.yaml]\n"})
    page = (ROOT / "docs/guides/kubernetes.md").read_text()
    (shown,) = re.findall(r"```yaml\n(# watched/kustomization.yaml\n.*?)```", page, re.S)
    return filed(folder, {"watched/kustomization.yaml": shown})


def test_foreign_gateway_gets_our_sidecar_last(part, beside):
    """Somebody's gateway gets our sidecar after its own container and keeps what it has."""
    found = kustomized(part("kubectl").path, beside / "watched")
    assert [] == core_mistakes(found, CORE[-1])
    assert [] == mismatches(found)
    pod, theirs = pods(found)["my-gateway"], yaml.safe_load(THEIRS)["spec"]["template"]["spec"]
    assert (theirs["containers"], theirs["volumes"]) == (pod["spec"]["containers"][:1], pod["spec"]["volumes"][:1])
    assert {"containers", "volumes"} == set(pod["spec"]), "rights and accounts of the pod are not ours to set"
    assert "my-gateway" == pod["metadata"]["labels"]["app"]
    assert {"my-gateway", BOARD} == set(pods(found))
    assert ["vllm-watch-sidecar"] == list(of_kind(found, "ServiceMonitor"))


def test_sidecar_in_a_foreign_pod_is_restricted(part, beside):
    """The sidecar in somebody's pod meets the restricted standard and keeps its state with the log."""
    found = kustomized(part("kubectl").path, beside / "watched")
    pod = pods(found)["my-gateway"]["spec"]
    ours = pod["containers"][1]
    assert {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    } == ours["securityContext"]
    mounts = {mount["mountPath"]: mount for mount in ours["volumeMounts"]}
    read = config.parse(
        of_kind(found, "ConfigMap")["vllm-watch-config"]["data"]["sidecar.yaml"], SidecarConfig, "sidecar.yaml"
    )
    (log,) = read.requests_log
    assert f"{running.LOGS}/out/requests.jsonl" == log
    assert ("logs", True) == (mounts[running.LOGS]["name"], mounts[running.LOGS]["readOnly"])
    assert ("logs", "vllm-watch") == (
        mounts[str(Path(str(read.state)).parent)]["name"],
        mounts[str(Path(str(read.state)).parent)]["subPath"],
    )
    secrets = {
        volume["secret"]["secretName"]: volume["secret"]["defaultMode"]
        for volume in pod["volumes"]
        if "secret" in volume
    }
    assert {"watch-tls": 0o444, "watch-login": 0o444} == secrets, (
        "the pod may have no fsGroup, and 0440 would be root's alone"
    )


def test_somebodys_gateway_never_has_two_sidecars_at_once(part, beside):
    """The second would find the state taken and end, its pod would never be ready, and a rolling update never over."""
    found = kustomized(part("kubectl").path, beside / "watched")
    assert {"type": "Recreate"} == of_kind(found, "Deployment")["my-gateway"]["spec"]["strategy"], (
        "which may have no rollingUpdate beside it"
    )


def test_filled_in_rolling_update_is_removed_first():
    """A server-side apply leaves it there, and Recreate is refused beside it."""
    (line,) = (step for step in files.next_steps(Path("m"), BESIDE) if " patch deployment " in step)
    assert line.startswith("kubectl -n vllm patch ")
    assert " my-gateway --type merge --patch '" in line
    assert {"spec": {"strategy": {"type": "Recreate", "rollingUpdate": None}}} == json.loads(line.split("'")[1])
    assert line.split("    #")[0] in (ROOT / "docs/guides/kubernetes.md").read_text()


def with_component(kubectl: Path, beside: Path, name: str) -> list[dict[str, Any]]:
    """The overlay of docs/guides/kubernetes.md with one component more."""
    shown = (beside / "watched/kustomization.yaml").read_text()
    return kustomized(
        kubectl, filed(beside, {f"{name}/kustomization.yaml": f"{shown}  - ../manifests/components/{name}\n"}) / name
    )


def test_no_policy_shuts_out_foreign_clients(part, beside):
    """No policy shuts out clients of somebody's gateway unless asked for."""
    found = kustomized(part("kubectl").path, beside / "watched")
    policies, labels = of_kind(found, "NetworkPolicy"), pods(found)["my-gateway"]["metadata"]["labels"]
    assert [] == [
        name for name, each in policies.items() if selects(each["spec"]["podSelector"]["matchLabels"], labels)
    ]
    added = of_kind(with_component(part("kubectl").path, beside, "sidecar-policy"), "NetworkPolicy")[
        "vllm-watch-sidecar"
    ]
    assert selects(added["spec"]["podSelector"]["matchLabels"], labels)
    assert ["Ingress"] == added["spec"]["policyTypes"]
    assert [PORTS["sidecar"]] == [port["port"] for rule in added["spec"]["ingress"] for port in rule["ports"]]
    assert [] == core_mistakes([added], CORE[-1])


def test_foreign_gateway_keeps_engines_until_told(part, beside):
    """The label that lets it in comes with those pods; a policy in the same apply would shut out the ones that run."""
    kubectl = part("kubectl").path
    assert "vllm-watch-engines" not in of_kind(kustomized(kubectl, beside / "watched"), "NetworkPolicy")
    found = with_component(kubectl, beside, "closed-engines")
    closed = of_kind(found, "NetworkPolicy")["vllm-watch-engines"]
    assert ("vllm", dict(BESIDE.engine_selector)) == (
        closed["metadata"]["namespace"],
        closed["spec"]["podSelector"]["matchLabels"],
    )
    assert selects(
        closed["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"],
        pods(found)["my-gateway"]["metadata"]["labels"],
    )
    assert [] == core_mistakes([closed], CORE[-1])
    opened = replace(BESIDE, restrict_engines=False, without=ONCE)
    assert [] == [name for name in files.files(opened) if "closed-engines" in name]
    assert "components/closed-engines" in "\n".join(files.next_steps(Path("m"), BESIDE))
    assert "components/closed-engines" not in "\n".join(files.next_steps(Path("m"), opened))


def test_kustomize_refuses_another_deployment(part, beside):
    """Patches by a target pass over what is not there, silently."""
    for number, (old, new, said) in enumerate((
        ("{name: my-gateway, namespace", "{name: other, namespace", "nothing selected by Deployment"),
        ("      volumes: [{name: logs, emptyDir: {}}]\n", "", "spec/volumes"),
    )):  # fmt: skip
        folder = filed(
            beside,
            {
                f"wrong{number}/d.yaml": THEIRS.replace(old, new),
                f"wrong{number}/kustomization.yaml": "resources: [d.yaml]\n",
            },
        )
        overlay = (beside / "watched/kustomization.yaml").read_text().replace("my-gateway", f"wrong{number}")
        done = kustomize(
            part("kubectl").path, filed(folder, {f"refused{number}/kustomization.yaml": overlay}) / f"refused{number}"
        )
        assert (1, True) == (done.returncode, said in done.stderr), done.stderr


def test_what_policies_or_certificates_would_stop_is_told():
    def told(**changes):
        return "\n".join(files.warnings(replace(USUAL, **changes)))

    for inside in (
        "http://vllm",
        "http://vllm-0.vllm:8000",
        "http://a.b.vllm.svc:8000",
        "http://vllm.vllm.svc.cluster.local:8000",
    ):
        assert "namespace vllm" not in told(engines=(inside,))
    for outside in ("http://vllm.other.svc:8000", "http://10.0.0.5:8000", "http://llm.example.org"):
        assert re.search(rf"{outside}: .*\bnamespace vllm; .*40-network\.yaml", told(engines=(outside,)))
        assert "namespace vllm" not in told(
            engines=(outside,), gateway=False, restrict_engines=False, own_gateway=BESIDE.own_gateway
        ), "what that may ask is not ours to say"
    assert "namespace monitoring" not in told()
    url = "https://thanos.example.org"
    assert re.search(rf"{url}: .*\bnamespace monitoring; .*40-network\.yaml", told(prometheus=url))
    assert "name their authority" in told(engines=("https://vllm:8000",))
    assert (
        "https"
        == monitoring.monitors(replace(USUAL, engines=("https://vllm:8000",)))[0]["spec"]["podMetricsEndpoints"][0][
            "scheme"
        ]
    )


# ---- what is in them


def test_rules_in_objects_are_the_default_ones(part, tmp_path):
    """Rules in the objects are the default ones and promtool takes them."""
    found = of_kind(objects(USUAL), "PrometheusRule")
    for name, each in found.items():
        (tmp_path / f"{name.removeprefix('vllm-watch-')}.yaml").write_text(yaml.safe_dump(each["spec"]))
    shipped = {
        path.name: yaml.safe_load(path.read_text().replace(Links().runbooks, LINKS.runbooks).replace(
            f"{Links().dashboards}/", f"{LINKS.dashboards}/"))
        for path in (ROOT / "alerts/prometheus").glob("*.yaml")
    }  # fmt: skip
    assert shipped == {path.name: yaml.safe_load(path.read_text()) for path in tmp_path.glob("*.yaml")}
    done = subprocess.run(
        [part("promtool").path, "check", "rules", "--lint=all", "--lint-fatal", *tmp_path.glob("*.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr


def test_dashboards_in_objects_are_the_default_ones():
    """Boards in the objects are the default ones for Grafana's sidecar."""
    maps = [
        each
        for each in of_kind(objects(USUAL), "ConfigMap").values()
        if "grafana_dashboard" in each["metadata"]["labels"]
    ]
    found = {board["uid"]: board for each in maps for board in map(json.loads, each["data"].values())}
    shipped = {
        board["uid"]: {**board, "editable": False}
        for path in (ROOT / "dashboards/json").glob("*.json")
        for board in [json.loads(path.read_text().replace(Links().runbooks, LINKS.runbooks))]
    }
    assert {board.slug for board in BOARDS} == {uid.removeprefix("vllm-watch-") for uid in shipped}
    assert shipped == found
    assert {"1"} == {each["metadata"]["labels"]["grafana_dashboard"] for each in maps}
    assert {"vLLM"} == {each["metadata"]["annotations"]["grafana_folder"] for each in maps}


def test_own_thresholds_and_links_reach_rules_and_board(tmp_path):
    """Own numbers and links are in rules boards and the board's command."""
    (tmp_path / "thresholds.yaml").write_text("thresholds: {queue_length: 77}\n")
    links = export.links("https://pages.example/runbooks", "https://grafana.example")
    wanted = replace(USUAL, rules=export.AlertOptions(tmp_path / "thresholds.yaml", links=links))
    rules = json.dumps([each["spec"] for _, each in monitoring.rules(wanted)])
    assert re.search(r">\s+77\b", rules.replace("\\n", " "))
    assert "https://pages.example/runbooks/VLLMQueueGrowing" in rules
    assert "https://grafana.example/d/" in rules
    assert "queue_length: 77" in running.config(wanted)["data"]["thresholds.yml"]
    assert "pages.example" in pods(list(running.board(wanted)))[BOARD]["spec"]["containers"][0]["args"], (
        "the board answers where links lead"
    )


def test_own_job_names_are_those_of_the_monitors(tmp_path):
    (tmp_path / "thresholds.yaml").write_text("engine_job: llm-serving\ngateway_job: 'gate.*'\n")
    found = list(
        monitoring.monitors(replace(USUAL, rules=export.AlertOptions(tmp_path / "thresholds.yaml", links=LINKS)))
    )
    endpoints = [
        one
        for kind in ("PodMonitor", "ServiceMonitor")
        for each in of_kind(found, kind).values()
        for one in endpoints_of(each)
    ]
    jobs = [rule["replacement"] for one in endpoints for rule in one["relabelings"] if rule.get("targetLabel") == "job"]
    assert ["llm-serving", "gateway", "sidecar"] == jobs
    with pytest.raises(ValueError, match=r"engine_job 'llm-\.\*' .*'vllm'.*\bvllm-2$"):
        replace(
            USUAL, rules=export.AlertOptions(written(tmp_path / "other.yaml", "engine_job: 'llm-.*'\n"), links=LINKS)
        )


def test_job_may_contain_a_label_value(tmp_path):
    """Alerts on a job of which no engine answers would else say nothing of one model out of several in a namespace."""
    ours = list(monitoring.monitors(replace(USUAL, job_label="llm.example.org/model-name")))
    engines, gateway = (endpoints_of(of_kind(ours, kind)[name])[0] for kind, name in (
        ("PodMonitor", "vllm-watch-engines"), ("ServiceMonitor", "vllm-watch-gateway")))  # fmt: skip
    jobs = [rule for rule in engines["relabelings"] if rule.get("targetLabel") == "job"]
    by_label = {
        "sourceLabels": ["__meta_kubernetes_pod_label_llm_example_org_model_name"],
        "regex": "(.+)",
        "replacement": "vllm-$1",
    }
    assert [{"targetLabel": "job", "replacement": "vllm"}, {"targetLabel": "job", **by_label}] == jobs, (
        "pods without the label keep the usual job"
    )
    assert 1 == len([rule for rule in gateway["relabelings"] if rule.get("targetLabel") == "job"])
    numbers = export.AlertOptions(written(tmp_path / "thresholds.yaml", "engine_job: llm\n"), links=LINKS)
    with pytest.raises(ValueError, match=r"\bllm-model\b.*\bengine_job 'llm' .*'llm\.\*'"):
        replace(USUAL, rules=numbers, job_label="model")


def test_role_comes_from_a_label_of_the_pods():
    """llm-d's label by default. Any other value, such as both, leaves the engine without a role."""
    for label, key in (("llm-d.ai/role", "llm_d_ai_role"), ("app.example.org/pd", "app_example_org_pd")):
        made = of_kind(list(monitoring.monitors(replace(USUAL, role_label=label))), "PodMonitor")["vllm-watch-engines"]
        rules = [rule for rule in endpoints_of(made)[0]["relabelings"] if rule.get("targetLabel") == promql.ROLE]
        assert [
            {
                "sourceLabels": [f"__meta_kubernetes_pod_label_{key}"],
                "regex": "(prefill|decode)",
                "targetLabel": promql.ROLE,
            }
        ] == rules
    assert promql.ROLE not in fleet.OF_PAGES.split("|"), "the fleet's relabelling would drop it"


def test_rules_and_boards_can_be_left_out():
    """Rules and boards are left out where another namespace of one Prometheus has brought them."""

    def kinds(wanted):
        return {kind: len(of_kind(objects(wanted), kind)) for kind in ("PrometheusRule", "ConfigMap", "PodMonitor")}

    assert {"PrometheusRule": 4, "ConfigMap": 1 + len(BOARDS), "PodMonitor": 1} == kinds(USUAL)
    assert {"PrometheusRule": 0, "ConfigMap": 1 + len(BOARDS), "PodMonitor": 1} == kinds(
        replace(USUAL, without=("rules",))
    )
    assert {"PrometheusRule": 0, "ConfigMap": 1, "PodMonitor": 1} == kinds(replace(USUAL, without=("rules", "boards")))


@pytest.mark.parametrize("wanted", [USUAL, BESIDE], ids=["ours", "theirs"])
def test_operator_labels_do_not_clash_with_page_labels(wanted):
    """podTargetLabels of the Prometheus object come first; what the monitor says of itself must stay."""
    for monitor in monitoring.monitors(wanted):
        for endpoint in endpoints_of(monitor):
            first, *others = endpoint["relabelings"]
            assert {"action": "labeldrop", "regex": fleet.OF_PAGES} == first
            assert [] == [rule["targetLabel"] for rule in others if re.fullmatch(fleet.OF_PAGES, rule["targetLabel"])]
    assert re.fullmatch(fleet.OF_PAGES, "team")


def endpoints_of(monitor: dict[str, Any]) -> list[dict[str, Any]]:
    return monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_configurations_are_what_gateway_and_sidecar_read():
    data = of_kind(objects(USUAL), "ConfigMap")["vllm-watch-config"]["data"]
    gateway, sidecar = (
        config.parse(data["gateway.yaml"], GatewayConfig, "g"),
        config.parse(data["sidecar.yaml"], SidecarConfig, "s"),
    )
    assert ("http://vllm:8000", ["http://vllm:8000"]) == (gateway.upstream, [engine.url for engine in sidecar.engines])
    assert (gateway.requests_log,) == sidecar.requests_log
    assert thresholds.ALL == tuple(
        map(Settings(config.parse(data["thresholds.yml"], Overrides, "t")).at, thresholds.ALL)
    )
    mounts = {
        mount["mountPath"]: mount["name"]
        for one in pods(objects(USUAL))[GATEWAY]["spec"]["containers"]
        for mount in one["volumeMounts"]
    }
    assert ["state", "teams", "state"] == [
        mounts[str(Path(str(path)).parent)] for path in (gateway.requests_log, gateway.teams, sidecar.state)
    ]
    assert sidecar.events == pods(objects(USUAL))[GATEWAY]["spec"]["containers"][1]["env"][0]["value"], (
        "annotate in that container writes there"
    )


def shipped(wanted: KubernetesOptions) -> ShipConfig:
    text = of_kind(objects(wanted), "ConfigMap")["vllm-watch-config"]["data"]["ship.yaml"]
    return config.parse(text, ShipConfig, "ship.yaml")


def test_shipper_is_added_on_request_only():
    """A folder is on the volume of the log, and then nothing goes out; a store is asked at its port."""
    folder = replace(USUAL, state_size="2Gi", shipping=ShipOptions(dataset="volume"))
    for wanted, writer in ((MUCH, "gateway-0"), (LEASED, "hostname"), (folder, "gateway-0")):
        found = shipped(wanted)
        assert (writer, (running.LOG,)) == (found.writer, found.requests_log)
        assert found.spool_bytes + 2 * found.seal_bytes < LEAST_SHIP_BYTES
        mounts = {
            mount["mountPath"]: mount["name"]
            for one in pods(objects(wanted))[GATEWAY]["spec"]["containers"]
            for mount in one["volumeMounts"]
            if one["name"] == "ship"
        }
        assert {"state"} == {mounts[str(Path(path).parent)] for path in (*found.requests_log, found.state)}
    assert ("east", "s3://logs/vllm") == (shipped(MUCH).cluster, shipped(MUCH).dataset)
    assert ("vllm", f"{running.STATE}/dataset") == (shipped(folder).cluster, shipped(folder).dataset)
    policy = "vllm-watch-gateway-ship"
    egress = [of_kind(objects(each), "NetworkPolicy")[policy]["spec"].get("egress") for each in (MUCH, folder)]
    assert [[{"ports": [{"protocol": "TCP", "port": 9000}]}], None] == egress
    assert "ship" not in json.dumps([each for each in objects(USUAL) if each["kind"] != "PrometheusRule"
                                     and "dashboard" not in json.dumps(each["metadata"])])  # fmt: skip


def test_board_answers_its_service_names_and_probes():
    """The board answers under the names of its service and to its probes."""
    container = pods(objects(USUAL))[BOARD]["spec"]["containers"][0]
    given = [word.replace("$(NAMESPACE)", "vllm") for word in container["args"]]
    listen = given[given.index("--listen") + 1].partition(":")[0]
    allowed = [name for option, name in itertools.pairwise(given) if option == "--allow-host"]
    assert {"NAMESPACE"} == {one["name"] for one in container["env"]}
    assert all(
        board_server.admitted(f"{host}:9402", listen, allowed)
        for host in (BOARD_SERVICE, *(f"{BOARD_SERVICE}.vllm{end}" for end in ("", ".svc", ".svc.cluster.local")))
    )
    assert not board_server.admitted("10.1.2.3:9402", listen, allowed), (
        "which is how the kubelet would ask without the header"
    )
    hosts = [
        header["value"]
        for probe in ("livenessProbe", "readinessProbe")
        for header in container[probe]["httpGet"]["httpHeaders"]
    ]
    assert ["localhost", "localhost"] == hosts
    assert board_server.admitted("localhost", listen, allowed)


# ---- the monitors in a real Prometheus


def meta(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


POD_TARGET_LABELS = ("team", "model_name")  # as a Prometheus object may have them


def relabelling(monitor: dict[str, Any], endpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """relabel_configs as the operator writes them for a monitor, in its order.

    After generatePodMonitorConfig and generateServiceMonitorConfig in its promcfg.go, release 0.93, without shards and
    enforced labels."""
    by_pod = monitor["kind"] == "PodMonitor"
    of = "pod" if by_pod else "service"
    name, spec = monitor["metadata"]["name"], monitor["spec"]
    made: list[dict[str, Any]] = [{"source_labels": ["job"], "target_label": "__tmp_prometheus_job_name"}]
    running = {"source_labels": ["__meta_kubernetes_pod_phase"], "regex": "(Failed|Succeeded)", "action": "drop"}
    made += [running] if by_pod else []
    for key, value in sorted(spec["selector"]["matchLabels"].items()):
        labels = [f"__meta_kubernetes_{of}_label_{meta(key)}", f"__meta_kubernetes_{of}_labelpresent_{meta(key)}"]
        made.append({"action": "keep", "source_labels": labels, "regex": f"({value});true"})
    if not by_pod:
        made.append(
            {"action": "keep", "source_labels": ["__meta_kubernetes_endpoint_port_name"], "regex": endpoint["port"]}
        )
    elif "port" in endpoint:
        made.append(
            {
                "action": "keep",
                "source_labels": ["__meta_kubernetes_pod_container_port_name"],
                "regex": endpoint["port"],
            }
        )
    else:
        made.append(
            {
                "action": "keep",
                "source_labels": ["__meta_kubernetes_pod_container_port_number"],
                "regex": str(endpoint["portNumber"]),
            }
        )
    for source, target in (
        ("namespace", "namespace"),
        *([] if by_pod else [("service_name", "service")]),
        ("pod_name", "pod"),
        ("pod_container_name", "container"),
    ):
        made.append({"source_labels": [f"__meta_kubernetes_{source}"], "target_label": target})
    if by_pod:
        made.append({"target_label": "job", "replacement": f"vllm/{name}"})
    else:
        made += [
            running,
            {"source_labels": ["__meta_kubernetes_service_name"], "target_label": "job", "replacement": "${1}"},
        ]
    made += [
        {
            "source_labels": [f"__meta_kubernetes_pod_label_{meta(key)}"],
            "regex": "(.+)",
            "target_label": meta(key),
            "replacement": "${1}",
        }
        for key in POD_TARGET_LABELS
    ]
    made += [{"target_label": "endpoint", "replacement": endpoint["port"]}] if "port" in endpoint else []
    return made + as_prometheus_writes(endpoint["relabelings"])


def as_prometheus_writes(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    words = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    return [{words.get(word, word): value for word, value in rule.items()} for rule in rules]


def scraped_as(
    monitor: dict[str, Any], found_pods: list[dict[str, str]], folder: Path, secrets: Path | None = None
) -> dict[str, Any]:
    """A scrape job of a monitor, over pods that a file lists with the labels that Kubernetes' discovery gives."""
    (endpoint,) = endpoints_of(monitor)
    path = folder / f"{monitor['kind']}-{monitor['metadata']['name']}.json"
    path.write_text(json.dumps([{"targets": [labels["__address__"]], "labels": labels} for labels in found_pods]))
    job = {
        "job_name": path.stem, "scrape_interval": endpoint["interval"], "scrape_timeout": endpoint["interval"],
        "metrics_path": endpoint["path"],
        "scheme": endpoint.get("scheme", "http"), "file_sd_configs": [{"files": [str(path)]}],
        "relabel_configs": relabelling(monitor, endpoint),
        "metric_relabel_configs": as_prometheus_writes(endpoint.get("metricRelabelings", [])),
    }  # fmt: skip
    if limit := monitor["spec"].get("sampleLimit"):
        job["sample_limit"] = limit
    if protocols := monitor["spec"].get("scrapeProtocols"):
        job["scrape_protocols"] = protocols
    if tls := endpoint.get("tlsConfig"):
        assert {"name": MUCH.tls_secret, "key": "ca.crt"} == tls["ca"]["secret"]
        job["tls_config"] = {"ca_file": f"{secrets}/tls/ca.crt", "server_name": tls["serverName"]}
    if login := endpoint.get("authorization"):
        assert {"name": MUCH.login_secret, "key": "token"} == login["credentials"]
        job["authorization"] = {"type": login["type"], "credentials_file": f"{secrets}/login/token"}
    return job


def discovered(
    address: str, port_name: str, labels: dict[str, str], pod: str, service: str = "", phase: str = "Running"
) -> dict[str, str]:
    """What Prometheus' Kubernetes discovery says of a pod's port, or of one behind a Service."""
    about = {
        "namespace": "vllm",
        "pod_name": pod,
        "pod_container_name": "c",
        "pod_node_name": "node-a",
        "pod_phase": phase,
    }
    about |= (
        {"service_name": service, "endpoint_port_name": port_name}
        if service
        else {"pod_container_port_name": port_name, "pod_container_port_number": "8000"}
    )
    of = "service" if service else "pod"
    for key, value in labels.items():
        about |= {f"{of}_label_{meta(key)}": value, f"{of}_labelpresent_{meta(key)}": "true"}
    return {"__address__": address, **{f"__meta_kubernetes_{key}": value for key, value in about.items()}}


class Captured(http.server.BaseHTTPRequestHandler):
    """A captured page of an engine."""

    def do_GET(self):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a Prometheus that ends does not wait
            self.send_page(PAGE.read_bytes())

    def send_page(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def captured_engine(port: int) -> Iterator[None]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Captured)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield
    server.shutdown()
    server.server_close()


@contextmanager
def process(*command: str | Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as said:
        child = subprocess.Popen(
            [str(word) for word in command],
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    try:
        yield child
    finally:
        child.terminate()
        child.wait(60)


def answer(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return json.load(reply)["data"]


@pytest.fixture(scope="module")
def watched(part, free_port, tmp_path_factory) -> Iterator[tuple[str, dict[str, int]]]:
    """A real Prometheus with the exported monitors and rules. It scrapes a captured page as an engine, one engine that
    is down, and the real gateway and sidecar, over TLS, which run with the exported configurations: only paths and
    ports are others."""
    folder = tmp_path_factory.mktemp("watched")
    # an engine that never was up is told as down, not as new
    at_once = written(folder / "thresholds.yml", "thresholds:\n  start_time: 1\n")
    found, port = (
        objects(replace(MUCH, rules=export.AlertOptions(at_once, links=LINKS))),
        {name: free_port() for name in (*PORTS, "engine", "gone", "prometheus")},
    )
    secret = folder / "etc/tls"
    for place in (
        secret,
        folder / "etc/login",
        folder / "etc/teams",
        folder / "etc/config",
        folder / "var/log",
        folder / "var/state",
    ):
        place.mkdir(parents=True)
    make_certificate(secret)
    (folder / "etc/login/token").write_text("a-word\n")
    _, key_hash = teams.make_key("demo")
    # Two engines: their addresses come from teams.yaml, as the export says.
    assert {"upstreams"} == set(yaml.safe_load(running.upstreams(MUCH)))
    (folder / "etc/teams/teams.yaml").write_text(yaml.safe_dump(
        {"teams": {"demo": {"keys": [key_hash]}}, **yaml.safe_load(running.upstreams(MUCH))}))  # fmt: skip
    for name, text in of_kind(found, "ConfigMap")["vllm-watch-config"]["data"].items():
        moved = text.replace("/etc/vllm-watch", f"{folder}/etc").replace("/var/lib/vllm-watch", f"{folder}/var")
        for what, usual in PORTS.items():
            moved = moved.replace(f"0.0.0.0:{usual}", f"127.0.0.1:{port[what]}")
        (folder / "etc/config" / name).write_text(moved)

    pod_monitor, monitors = of_kind(found, "PodMonitor")["vllm-watch-engines"], of_kind(found, "ServiceMonitor")
    ours, engine = of_kind(found, "Service")["watch-metrics"]["metadata"]["labels"], dict(MUCH.engine_selector)
    engines = [
        discovered(f"127.0.0.1:{port['engine']}", "http", {**engine, **of_model("chat")}, "vllm-0"),
        discovered(f"127.0.0.1:{port['gone']}", "http", {**engine, **of_model("embed")}, "vllm-1"),
        discovered("127.0.0.1:1", "http", engine, "vllm-job", phase="Succeeded"),
        discovered("127.0.0.1:2", "http", {"app": "other"}, "other"),
        discovered("127.0.0.1:3", "ssh", engine, "vllm-0"),
    ]
    behind = [
        discovered(f"127.0.0.1:{port[name]}", name, ours, "gateway-pod", "watch-metrics")
        for name in ("gateway-metrics", "sidecar")
    ]
    (folder / "rules").mkdir()
    for name, each in of_kind(found, "PrometheusRule").items():
        (folder / "rules" / f"{name}.yaml").write_text(yaml.safe_dump(each["spec"]))
    jobs = [
        scraped_as(pod_monitor, engines, folder),
        *(scraped_as(monitor, behind, folder, folder / "etc") for monitor in monitors.values()),
    ]
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                "rule_files": [f"{folder}/rules/*.yaml"],
                "scrape_configs": jobs,
            }
        )
    )
    url = f"http://127.0.0.1:{port['prometheus']}"
    with ExitStack() as stack:
        stack.enter_context(captured_engine(port["engine"]))
        for what in ("gateway", "sidecar"):
            arguments = [sys.executable, "-m", "stack.cli", what, "run", "--config", folder / f"etc/config/{what}.yaml"]
            stack.enter_context(process(*arguments, log=folder / f"{what}.log"))
        server = (
            part("prometheus").path,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port['prometheus']}",
        )
        stack.enter_context(process(*server, log=folder / "prometheus.log"))
        eventually(
            lambda: (
                ["0", "1", "1", "1"]
                == sorted(one["value"][1] for one in answer(f"{url}/api/v1/query?query=up")["result"])
            ),
            what="three of four targets that answer, and the fourth asked",
        )
        yield url, port


def of_model(name: str) -> dict[str, str]:
    """Labels of an engine's pod: one by which its job is called, and two that its page has as well."""
    return {MUCH.job_label: name, "team": "platform", "model_name": "of-the-pod"}


def make_certificate(folder: Path) -> None:
    """tls.crt, tls.key and ca.crt of the name that the monitors expect, signed by itself."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-subj", "/CN=metrics",
         "-addext", "subjectAltName=DNS:watch-metrics", "-keyout", folder / "tls.key", "-out", folder / "tls.crt"],
        check=True, capture_output=True,
    )  # fmt: skip
    shutil.copy(folder / "tls.crt", folder / "ca.crt")


def query(url: str, expr: str) -> list[dict[str, str]]:
    return [one["metric"] for one in answer(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}")["result"]]


@pytest.mark.prometheus
def test_targets_have_the_labels_that_rules_and_boards_expect(watched):
    url, port = watched
    kept = ("cluster", "namespace", "job", "instance", "pod", "node")
    found = [tuple(labels.get(name, "") for name in kept) for labels in query(url, "up")]
    at = {name: f"127.0.0.1:{number}" for name, number in port.items()}
    assert sorted([
        ("east", "vllm", "vllm-chat", at["engine"], "vllm-0", "node-a"),
        ("east", "vllm", "vllm-embed", at["gone"], "vllm-1", "node-a"),
        ("east", "vllm", "gateway", at["gateway-metrics"], "gateway-pod", "node-a"),
        ("east", "vllm", "sidecar", at["sidecar"], "gateway-pod", "node-a"),
    ]) == sorted(found)  # fmt: skip


@pytest.mark.prometheus
def test_the_variables_of_a_board_offer_what_was_scraped(watched):
    url, port = watched
    overview = BOARDS[0]
    offered: dict[str, list[str]] = {}
    for variable in variables.of(overview):
        matched = re.fullmatch(r"label_values\((.*), (\w+)\)", variable.query)
        assert matched, variable.query
        series = re.sub(r"\$(\w+)", ".*", matched[1])
        offered[variable.name] = answer(
            f"{url}/api/v1/label/{matched[2]}/values?{urllib.parse.urlencode({'match[]': series})}"
        )
    assert {"cluster", "namespace", "job", "instance", "model_name"} <= set(offered)
    assert (["east"], ["vllm"], ["vllm-chat"], [f"127.0.0.1:{port['engine']}"]) == tuple(
        offered[name] for name in ("cluster", "namespace", "job", "instance")
    )
    assert 1 == len(offered["model_name"])


@pytest.mark.prometheus
def test_exported_rules_see_a_model_down_and_the_watchdog(watched):
    """An alert of the exported rules sees the model that is down beside one that is not and the watchdog fires."""
    url, _ = watched

    def states():
        return {(one["alertname"], one.get("job", "")): one["alertstate"] for one in query(url, "ALERTS")}

    eventually(lambda: ("VLLMWatchdog", "") in states(), "the watchdog")
    eventually(lambda: ("VLLMEngineDown", "vllm-embed") in states(), "the alert on the model that is down")
    assert "firing" == states()["VLLMWatchdog", ""]
    assert "pending" == states()["VLLMEngineDown", "vllm-embed"], "it holds for a minute before it fires"
    eventually(lambda: ("VLLMEngineDown", "vllm-chat") not in states(), "no alert on the other model")
    health = {one["name"]: one["health"] for group in answer(f"{url}/api/v1/rules")["groups"] for one in group["rules"]}
    assert {} == {name: word for name, word in health.items() if word not in ("ok", "unknown")}, (
        "unknown: those of a minute and more were not due yet"
    )


@pytest.mark.prometheus
def test_page_keeps_its_labels_beside_pod_labels(watched):
    """A page keeps its own labels beside those of pods and nothing that is never read."""
    url, _ = watched
    eventually(
        lambda: ["tiny"] == [labels["model_name"] for labels in query(url, "vllm:num_requests_running")], "its series"
    )
    assert [] == query(url, '{exported_model_name!=""} or {exported_team!=""}')
    assert [] == query(url, '{__name__=~".+_created", job=~"vllm.*"}')


@pytest.mark.prometheus
def test_the_limit_of_samples_is_that_of_each_job(watched):
    url, _ = watched
    given = answer(f"{url}/api/v1/status/config")["yaml"]
    assert 3 == given.count("sample_limit: 5000")


@pytest.mark.prometheus
def test_metrics_need_the_token_and_probes_do_not(watched):
    """Values of gateway and sidecar are refused without the token and probes are not."""
    _, port = watched
    unchecked = ssl._create_unverified_context()  # noqa: S323  Prometheus checks it; here the login is asked about
    for name in ("gateway-metrics", "sidecar"):
        at = f"https://127.0.0.1:{port[name]}"
        assert 200 == urllib.request.urlopen(f"{at}/-/healthy", timeout=60, context=unchecked).status
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{at}/metrics", timeout=60, context=unchecked)


def test_pages_are_limited_as_budgeted():
    """Pages are limited as the budget says unless a number or none was asked for."""

    def limits(wanted):
        return {each["metadata"]["name"]: each["spec"].get("sampleLimit") for each in monitoring.monitors(wanted)}

    names = {"vllm-watch-engines": "vllm", "vllm-watch-gateway": "gateway", "vllm-watch-sidecar": "sidecar"}
    assert {name: budget.SAMPLE_LIMIT[job] for name, job in names.items()} == limits(USUAL)
    assert dict.fromkeys(names, 10) == limits(replace(USUAL, sample_limit=10))
    assert dict.fromkeys(names) == limits(replace(USUAL, sample_limit=0))


# ---- the log in the pod


def rotation() -> dict[str, Any]:
    return next(one for one in pods(objects(USUAL))[GATEWAY]["spec"]["containers"] if one["name"] == "rotate")


def test_large_log_is_renamed_and_the_end_is_prompt(tmp_path):
    """The script as the container runs it, under a real shell."""
    log = tmp_path / "requests.jsonl"
    log.write_text("x" * 90 + "\n")
    env = {"PATH": os.environ["PATH"], "LOG": str(log), "BYTES": "100", "EVERY_S": "0.05"}
    container = rotation()
    assert {"LOG", "BYTES", "EVERY_S"} == {each["name"] for each in container["env"]}
    shell = subprocess.Popen([*container["command"], *container["args"]], env=env)
    try:
        with log.open("a") as more:
            more.write("y" * 90 + "\n")
        eventually(lambda: not log.exists(), what="the renamed log")
        assert "x" * 90 + "\n" + "y" * 90 + "\n" == (tmp_path / "requests.jsonl.1").read_text()
        log.write_text("z" * 200)
        eventually(lambda: "z" * 200 == (tmp_path / "requests.jsonl.1").read_text(), what="the next one in its place")
        assert shell.poll() is None, "a log that is not there does not end it"
    finally:
        shell.send_signal(signal.SIGTERM)
    assert 0 == shell.wait(60)


def test_the_log_outlives_its_pod_on_the_volume_of_the_state():
    """Gateway and sidecar end together: what the gateway wrote after the sidecar's last look is read by the next
    one."""
    pod = pods(objects(USUAL))[GATEWAY]["spec"]
    kinds = {volume["name"]: set(volume) - {"name"} for volume in pod["volumes"]}
    homes = {
        path: {
            json.dumps(mount, sort_keys=True)
            for one in pod["containers"]
            for mount in one["volumeMounts"]
            if mount["mountPath"] == path
        }
        for path in (running.LOGS, running.STATE)
    }
    (log,), (state,) = ((json.loads(one) for one in homes[path]) for path in (running.LOGS, running.STATE))
    assert ({"persistentVolumeClaim"}, state["name"]) == (kinds[log["name"]], log["name"])
    assert ("log", None) == (log.get("subPath"), state.get("subPath")), (
        "the state of an earlier export stays where it was"
    )
    assert ["gateway", "sidecar", "rotate"] == [
        one["name"]
        for one in pod["containers"]
        if any(mount["mountPath"] == running.LOGS for mount in one["volumeMounts"])
    ]


def test_two_logs_and_a_state_fit_into_their_volume():
    values = {each["name"]: each["value"] for each in rotation()["env"]}
    assert running.LOG == values["LOG"]
    assert 3 * int(values["BYTES"]) <= LEAST_STATE_BYTES
    assert "768Mi" == replace(USUAL, state_size="768Mi").state_size


# ---- the command


def run(*arguments: str | Path) -> Result:
    links = () if "--runbook-base" in arguments else ("--runbook-base", LINKS.runbooks)
    given = [*map(str, arguments), *links, "--dashboard-base", str(LINKS.dashboards)]
    result = CliRunner().invoke(cli.main, ["kubernetes", "export", *given])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_same_export_again_changes_nothing(tmp_path, few):
    first, again = (json.loads(run("--out", tmp_path / "m", "--json").stdout) for _ in range(2))
    assert {True} == {row["changed"] for row in first["files"]}
    assert {False} == {row["changed"] for row in again["files"]}
    assert set(files.files(OBSERVED)) == {str(Path(row["path"]).relative_to(tmp_path / "m")) for row in again["files"]}


def test_foreign_file_is_refused_before_writing(tmp_path, few):
    """A file that is not ours is refused before anything is written."""
    theirs = written_in(tmp_path / "m/base/50-monitors.yaml", "kind: Deployment\n")
    refused = run("--out", tmp_path / "m")
    assert 2 == refused.exit_code
    assert re.search(f"^Error: {theirs} .*--out.*--force", refused.stderr, re.MULTILINE)
    assert [theirs] == [path for path in (tmp_path / "m").rglob("*") if path.is_file()]
    assert 0 == run("--out", tmp_path / "m", "--force").exit_code


def written_in(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True)
    return written(path, text)


def test_a_smaller_export_names_what_an_earlier_one_left(tmp_path, few):
    run("--out", tmp_path, "--own-gateway", "my-gateway:logs/requests.jsonl")
    told = json.loads(run("--out", tmp_path, "--json").stdout)
    assert {str(tmp_path / name) for name in ("base/20-sidecar.yaml", "components/sidecar/container.yaml")} <= set(
        told["left_over"]
    )


def test_next_steps_are_the_lines_to_type_and_hold_no_secret(tmp_path, few):
    told = run(
        "--out",
        tmp_path,
        "--gateway",
        "--engine",
        "http://a:8000",
        "--engine",
        "http://b.c:8000",
        "--tls-secret",
        "watch-tls",
    ).stdout
    assert re.search(
        r"kubectl -n vllm \w+ secret generic vllm-watch-teams --from-file=teams\.yaml --from-file=gateway\.secret", told
    )
    assert f"kubectl apply --server-side -k {tmp_path}/base" in told
    assert re.search(r"upstreams:\n {2}a:\n {4}url: http://a:8000\n {2}b:\n {4}url: http://b\.c:8000", told)
    assert re.search(r"\bwatch-tls .*\btls\.crt, tls\.key and ca\.crt\b", told)


WRONG = [
    (("--namespace", "My_Space"), "--namespace 'My_Space' is no name in Kubernetes"),
    (("--engine", "vllm:8000"), "--engine 'vllm:8000' is no engine's address; write it like http://127.0.0.1:8001"),
    (("--engine", "http://u:p@vllm:8000"), "has a user or a password before it"),
    (("--engine-selector", "vllm"), "--engine-selector 'vllm' is no label; write it like KEY=VALUE"),
    (("--engine-selector", "app=my vllm"), "--engine-selector 'app=my vllm' is no label in Kubernetes"),
    (("--label", "-x=1"), "--label '-x=1' is no label in Kubernetes"),
    (("--label", "release=a", "--label", "release=b"), "--label release has two values"),
    (("--engine-port", "99999"), "--engine-port '99999' is neither a port number nor the name of a container's port"),
    (("--engine-port", "HTTP"), "--engine-port 'HTTP' is neither a port number nor the name of a container's port"),
    (("--prometheus", "prometheus:9090"), "--prometheus 'prometheus:9090' is no web address"),
    (("--interval", "15"), "15"),
    (("--interval", "0s"), "--interval 0s is too short"),
    (("--sample-limit", "-1"), "--sample-limit is a number of samples"),
    (("--image", "My Image"), "--image 'My Image' is no image"),
    (("--state-size", "1 GB"), "--state-size '1 GB' is no size; write it like 1Gi"),
    (
        ("--state-size", "700Mi"),
        "--state-size 700Mi: two logs of 256 MiB lie there beside the state; write 1Gi or more",
    ),
    (("--job-from-label", "my model"), "--job-from-label 'my model=' is no label in Kubernetes"),
    (("--without", "monitors"), "'monitors' is not one of 'rules', 'boards'"),
    (("--tls-secret", "A b"), "--tls-secret 'A b' is no name in Kubernetes"),
    (("--login-secret", "A b"), "--login-secret 'A b' is no name in Kubernetes"),
    (
        ("--own-gateway", "my-gateway"),
        "--own-gateway 'my-gateway' is no DEPLOYMENT:VOLUME/FILE; write it like my-gateway:logs/requests.jsonl",
    ),
    (("--own-gateway", ""), "--own-gateway '' is no DEPLOYMENT:VOLUME/FILE"),
    (("--own-gateway", "my-gateway:logs/"), "--own-gateway 'my-gateway:logs/' is no DEPLOYMENT:VOLUME/FILE"),
    (("--own-gateway", "My Gateway:logs/a"), "--own-gateway 'My Gateway' is no name in Kubernetes"),
    (("--own-gateway", "g:logs/../a"), "'../a' is no path of a file from the root of the volume"),
    (("--gateway", "--own-gateway", "g:logs/a"), "--gateway adds ours, and --own-gateway is for one of yours"),
    (("--replicas", "2"), "--replicas and --max-replicas are for the gateway of vllm-watch; add --gateway"),
    (("--gateway", "--replicas", "0"), "replicas"),
    (("--gateway", "--replicas", "3", "--max-replicas", "3"), "--max-replicas 3 is no more than --replicas 3"),
    (("--gateway", "--store", "redis://a"), "a store is for several gateways; add --replicas 2 or more"),
    (("--gateway", "--replicas", "2", "--valkey"), "--valkey needs --store-secret NAME"),
    (("--gateway", "--replicas", "2", "--store-secret", "a"), "--store-secret and --store-user are for a store"),
    (("--gateway", "--replicas", "2", "--store", "http://a"), "'http://a' is no store"),
    (("--gateway", "--replicas", "2", "--store", "redis://u:p@a"), "has a user or a password in it"),
    (("--gateway", "--replicas", "2", "--store", "redis://a", "--store-user", "b"), "user needs a password_file"),
    (("--gateway", "--replicas", "2", "--valkey", "--store", "redis://a"), "leave one of them out"),
    (
        ("--gateway", "--replicas", "2", "--valkey", "--store-secret", "A b"),
        "--store-secret 'A b' is no name in Kubernetes",
    ),
    (
        ("--ship", "volume", "--state-size", "2Gi"),
        "--ship is for the request log of the gateway of vllm-watch; add --gateway",
    ),
    (("--gateway", "--ship", "volume"), "--state-size 1Gi: with --ship, segments lie there beside two logs"),
    (("--gateway", "--ship", "/srv/data"), "--ship '/srv/data' is no location; write s3://bucket/prefix, or volume"),
    (("--gateway", "--ship", "s3://"), "--ship s3:// names no bucket"),
    (("--gateway", "--ship", "volume", "--ship-secret", "a"), "--ship-secret are for a store; add --ship s3://BUCKET"),
    (("--gateway", "--ship", "s3://a", "--ship-secret", "A b"), "--ship-secret 'A b' is no name in Kubernetes"),
    (("--gateway", "--ship", "s3://a", "--ship-endpoint", "http://s3"), "--ship-endpoint 'http://s3' must begin with"),
    (("--gateway", "--ship", "s3://a", "--cluster", "a/b"), "--ship: --cluster 'a/b' needs 1 to 64 letters, digits"),
    (("--tls-secret", "tls"), "--tls-secret protects the metrics of gateway and sidecar; add --gateway, --sidecar or"),
    (("--login-secret", "login"), "--login-secret protects the metrics of gateway and sidecar; add --gateway"),
    (("--restrict-engines",), "--restrict-engines lets only a gateway ask the engines, and there is none"),
    (("--restrict-engines", "--sidecar"), "--restrict-engines lets only a gateway ask the engines, and there is none"),
    (("--runbook-base", "http://127.0.0.1:9402"), "--runbook-base is missing or leads to this machine alone"),
    (("--alertmanager-config", "pager"), "'pager' is not one of"),
    (("--alertmanager-secret", "A b"), "--alertmanager-secret 'A b' is no name in Kubernetes"),
    (("--cluster", "$1"), "--cluster '$1' is no name"),
    (("--runbook-base", "wiki"), "wiki is no web address"),
    (("--thresholds", "/nowhere.yaml"), "/nowhere.yaml cannot be read"),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG, ids=[" ".join(options) for options, _ in WRONG])
def test_a_wrong_option_gets_one_sentence_and_nothing_is_written(options, sentence, tmp_path):
    refused = run("--out", tmp_path / "m", *options)
    assert 2 == refused.exit_code
    assert sentence in refused.stderr
    assert 1 == len([line for line in refused.stderr.splitlines() if line.startswith("Error: ")])
    assert not (tmp_path / "m").exists()


def test_engine_is_called_by_the_first_word_of_its_host():
    """An engine is called by the first word of its host where that tells them apart."""

    def named(*urls):
        return list(replace(USUAL, engines=urls).engine_names)

    assert ["vllm"] == named("http://vllm.llm.svc:8000")
    assert ["vllm-0", "vllm-1"] == named("http://vllm-0.vllm:8000", "http://vllm-1.vllm:8000")
    assert ["vllm.a:8000", "vllm.b:8000"] == named("http://vllm.a:8000", "http://vllm.b:8000")


def test_the_shipped_jobs_are_those_of_the_shipped_rules():
    overlay = Settings(Overrides()).overlay
    jobs = USUAL.jobs
    assert all(
        re.fullmatch(pattern, name)
        for pattern, name in itertools.zip_longest(
            (overlay.engine_job, overlay.gateway_job, overlay.sidecar_job), (jobs.engine, jobs.gateway, jobs.sidecar)
        )
    )
