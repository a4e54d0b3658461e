"""The Helm chart: the objects of `vllm-watch kubernetes export` for the same options, and values that are checked.

Its templates are rendered by Go's text/template and Sprig (stack/lab/chart_renderer); test_helm_sdk.py compares that
with Helm itself."""

from __future__ import annotations

import base64
import copy
import functools
import gzip
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from alerts import export
from alerts.rules import Links
from stack import cli
from stack.deploy.helm import chart, template, values
from stack.deploy.kubernetes import files, replicas
from stack.deploy.kubernetes.options import ONCE, KubernetesOptions
from stack.deploy.kubernetes.replica_options import ReplicaOptions
from stack.deploy.kubernetes.ship_options import ShipOptions
from stack.lab.install import InstalledPart
from stack.root import ROOT, version

CHART = ROOT / chart.CHART
GUIDE = ROOT / "docs/guides/helm.md"
LIMIT_BYTES = 1 << 20  # of all data of a Secret; Helm keeps a release in one
HELMS = {f"app.kubernetes.io/{name}" for name in ("instance", "version", "managed-by")} | {"helm.sh/chart"}
DIGEST = "checksum/vllm-watch-config"
LINKED = {"links": {"runbooks": "https://wiki.example.org/runbooks", "dashboards": "https://grafana.example.org"}}
OBSERVED = KubernetesOptions(
    image=f"vllm-watch:{version()}", rules=export.AlertOptions(links=Links(*LINKED["links"].values()))
)
TWO = ("http://vllm-0.vllm:8000", "http://vllm-1.vllm:8000")
TWO_GATEWAYS = {"enabled": True, "replicas": 2}
# values of the chart beside the options of an export
SETS: dict[str, tuple[dict[str, Any], KubernetesOptions]] = {
    "default": ({}, OBSERVED),
    "board": (
        {"board": {"enabled": True}, "links": {"runbooks": "", "dashboards": ""}},
        replace(OBSERVED, board=True, rules=export.AlertOptions()),
    ),
    "gateway": (
        {"gateway": {"enabled": True}, "board": {"enabled": True}, "engines": {"restrict": True}},
        replace(OBSERVED, gateway=True, board=True, restrict_engines=True),
    ),
    "sidecar": ({"sidecar": {"enabled": True}}, replace(OBSERVED, sidecar=True)),
    "much": (
        {
            "gateway": {"enabled": True, "existingSecret": "my-teams"},
            "board": {"enabled": True},
            "engines": {
                "restrict": True, "port": "http", "jobLabel": "llm.example.org/model",
                "endpoints": [{"name": url[7:13], "url": url} for url in TWO],
                "podSelector": {"matchLabels": {"app.kubernetes.io/name": "vllm", "tier": "gpu"}},
            },
            "image": {"registry": "registry.example.org:5000", "repository": "team/vllm-watch", "tag": "1"},
            "operatorLabels": {"release": "kps"}, "cluster": "east", "interval": "1m",
            "sampleLimits": {"engine": 2_000_000, "gateway": 2_000_000, "sidecar": 2_000_000},
            "state": {"size": "10Gi", "storageClass": "fast"},
            "tls": {"existingSecret": "watch-tls"}, "login": {"existingSecret": "watch-login"},
            "monitoring": {"namespace": "observability"},
            "ship": {"dataset": "s3://logs/vllm", "endpoint": "https://s3.example.org:9000", "region": "eu-central-1",
                     "existingSecret": "watch-ship"},
        },
        replace(
            OBSERVED, gateway=True, teams_secret="my-teams", board=True, restrict_engines=True, engine_port="http",
            job_label="llm.example.org/model", engines=TWO,
            engine_selector=(("app.kubernetes.io/name", "vllm"), ("tier", "gpu")),
            image="registry.example.org:5000/team/vllm-watch:1", operator_labels=(("release", "kps"),), cluster="east",
            interval="1m", sample_limit=2_000_000, state_size="10Gi", storage_class="fast", tls_secret="watch-tls",
            login_secret="watch-login", monitoring="observability",
            shipping=ShipOptions(dataset="s3://logs/vllm", endpoint="https://s3.example.org:9000",
                                 region="eu-central-1", secret="watch-ship"),
        ),
    ),
    "shipped-volume": (
        {"gateway": {"enabled": True}, "ship": {"dataset": "volume"}, "state": {"size": "2Gi"}},
        replace(OBSERVED, gateway=True, state_size="2Gi", shipping=ShipOptions(dataset="volume")),
    ),
    "shipped-aws": (
        {"gateway": {"enabled": True, "replicas": 2}, "ship": {"dataset": "s3://logs"}, "state": {"size": "2Gi"}},
        replace(
            OBSERVED, gateway=True, state_size="2Gi", gateways=ReplicaOptions(count=2),
            shipping=ShipOptions(dataset="s3://logs"),
        ),
    ),
    "gateways": (
        {"gateway": {"enabled": True, "replicas": 3}, "board": {"enabled": True}},
        replace(OBSERVED, gateway=True, board=True, gateways=ReplicaOptions(count=3)),
    ),
    "leased": (
        {
            "gateway": {"enabled": True, "replicas": 2, "autoscaling": {"maxReplicas": 6, "streams": 150}},
            "store": {"existingSecret": "watch-store", "valkey": {"enabled": True}},
            "engines": {"restrict": True}, "state": {"size": "2Gi", "storageClass": "fast"},
            "tls": {"existingSecret": "watch-tls"},
        },
        replace(
            OBSERVED, gateway=True, restrict_engines=True, state_size="2Gi", storage_class="fast",
            tls_secret="watch-tls",
            gateways=ReplicaOptions(count=2, most=6, streams=150, valkey=True, store_secret="watch-store"),
        ),
    ),
    "store": (
        {
            "gateway": {"enabled": True, "replicas": 2},
            "store": {"url": "rediss://redis.example.org:6380/1", "user": "llm", "existingSecret": "redis"},
        },
        replace(
            OBSERVED, gateway=True,
            gateways=ReplicaOptions(
                count=2, store="rediss://redis.example.org:6380/1", store_user="llm", store_secret="redis"
            ),
        ),
    ),
    "open-store": (
        {"gateway": {"enabled": True, "replicas": 2}, "store": {"url": "valkey://valkey.cache.svc"}},
        replace(OBSERVED, gateway=True, gateways=ReplicaOptions(count=2, store="valkey://valkey.cache.svc")),
    ),
    "token": (
        {"sidecar": {"enabled": True}, "login": {"existingSecret": "watch-login"}},
        replace(OBSERVED, sidecar=True, login_secret="watch-login"),
    ),
    "monitors": (
        {"rules": {"enabled": False}, "dashboards": {"enabled": False}, "links": {"runbooks": "", "dashboards": ""}},
        replace(OBSERVED, without=ONCE, rules=export.AlertOptions()),
    ),
    "slack": ({"alertmanagerConfig": {"receiver": "slack"}}, replace(OBSERVED, routes="slack")),
    "pagerduty": (
        {"alertmanagerConfig": {"receiver": "pagerduty", "existingSecret": "keys"}, "operatorLabels": {"a": "b"}},
        replace(OBSERVED, routes="pagerduty", routes_secret="keys", operator_labels=(("a", "b"),)),
    ),
    "prometheus": (
        {"board": {"enabled": True}, "monitoring": {"prometheusUrl": "https://thanos.example.org"}},
        replace(OBSERVED, board=True, prometheus="https://thanos.example.org"),
    ),
    "https": (
        {
            "gateway": {"enabled": True}, "sampleLimits": {"engine": 0, "gateway": 0, "sidecar": 0},
            "engines": {"port": 9000, "endpoints": [{"name": "a", "url": "https://a.vllm:9000"}]},
        },
        replace(OBSERVED, gateway=True, sample_limit=0, engine_port="9000", engines=("https://a.vllm:9000",)),
    ),
    "either": (
        {"engines": {"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["a", "b"]}]}}},
        replace(OBSERVED, engine_selector=(("app", "a"), ("app", "b"))),
    ),
}  # fmt: skip
# Rules and dashboards are most of an export, and the same in each.
WITH_RULES = ("default", "board", "much")
FEW = {"rules": {"enabled": False}, "dashboards": {"enabled": False}}
COMPARED = {
    name: (given, wanted) if name in WITH_RULES else (given | FEW, replace(wanted, without=ONCE))
    for name, (given, wanted) in SETS.items()
}


@dataclass(frozen=True)
class Rendered:
    """Text of each template of a chart."""

    texts: dict[str, str]

    @functools.cached_property
    def objects(self) -> list[dict[str, Any]]:
        texts = [text for name, text in self.texts.items() if not name.endswith("NOTES.txt")]
        return [each for text in texts for each in yaml.load_all(text, yaml.CSafeLoader) if each]

    @property
    def notes(self) -> str:
        return self.texts["templates/NOTES.txt"]

    def named(self, kind: str, name: str) -> dict[str, Any]:
        [found] = [each for each in self.objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
        return found


Render = Callable[..., Rendered]


@pytest.fixture
def render(part: Callable[[str], InstalledPart]) -> Render:
    def rendered(given: dict[str, Any], folder: Path = CHART) -> Rendered:
        done = run_renderer(part, given, folder)
        assert 0 == done.returncode, done.stderr
        return Rendered(json.loads(done.stdout))

    return rendered


def run_renderer(part: Callable[[str], InstalledPart], given: dict[str, Any], folder: Path = CHART) -> Any:
    program = part("chart-renderer").path
    return subprocess.run(
        [program, folder, "watch", "vllm"],
        input=json.dumps(LINKED | given),
        capture_output=True,
        text=True,
        check=False,
    )


def as_exported(made: dict[str, Any]) -> dict[str, Any]:
    """An object of the chart without what Helm's conventions add, and with texts of configuration as data."""
    made = copy.deepcopy(made)
    metadata = made["metadata"]
    assert metadata.pop("namespace", "vllm") == "vllm"
    metadata["labels"] = {key: value for key, value in metadata["labels"].items() if key not in HELMS}
    if made["kind"] in ("Deployment", "StatefulSet"):
        assert made["spec"]["template"]["metadata"]["annotations"].pop(DIGEST)
    if made["metadata"]["name"] == "vllm-watch-config":
        made["data"] = {name: yaml.safe_load(text) for name, text in made["data"].items()}
    return made


def exported(wanted: KubernetesOptions) -> Iterator[dict[str, Any]]:
    for name, text in files.files(wanted).items():
        if name.startswith("base/") and not name.endswith("kustomization.yaml"):
            yield from yaml.load_all(text, yaml.CSafeLoader)


def by_name(objects: Any) -> dict[tuple[str, str], dict[str, Any]]:
    found = [((each["kind"], each["metadata"]["name"]), as_exported(each)) for each in objects]
    assert len(found) == len(dict(found)), "an object is there twice"
    return dict(found)


@pytest.mark.parametrize(("given", "wanted"), COMPARED.values(), ids=COMPARED)
def test_objects_are_those_of_the_export(given, wanted, render):
    assert [] == mistakes(LINKED | given)
    expected, made = by_name(exported(wanted)), by_name(render(given).objects)
    assert sorted(expected) == sorted(made)
    for key, each in expected.items():
        assert each == made[key], key


def test_another_image_or_setting_makes_new_pods(render):
    def digest(given):
        deployment = render({"sidecar": {"enabled": True, **given}, **FEW}).named("Deployment", "vllm-watch-sidecar")
        return deployment["spec"]["template"]["metadata"]["annotations"][DIGEST]

    assert digest({}) == digest({})
    assert digest({}) != digest({"settings": {"poll": "10s"}})


# ---- conventions of Helm


def test_labels_of_the_release_are_in_no_selector(render):
    extra = {
        "commonLabels": {"cost-centre": "7"},
        "commonAnnotations": {"note": "x"},
        "operatorLabels": {"release": "kps"},
    }
    found = render({"gateway": {"enabled": True}, "board": {"enabled": True}, "engines": {"restrict": True}, **extra})
    for each in found.objects:
        labels = each["metadata"]["labels"]
        assert HELMS | {"cost-centre"} <= set(labels)
        assert "x" == each["metadata"]["annotations"]["note"]
        assert ("release" in labels) == (each["apiVersion"] == "monitoring.coreos.com/v1"), each["metadata"]["name"]
        assert "cost-centre" not in json.dumps(each.get("spec", {}))
    assert found.named("PodMonitor", "vllm-watch-engines")["metadata"]["labels"]["helm.sh/chart"] == (
        f"vllm-watch-{version()}"
    )


def test_pods_take_the_options_of_a_platform(render):
    pod = {
        "annotations": {"a": "1"}, "labels": {"b": "2"}, "nodeSelector": {"c": "3"}, "tolerations": [{"key": "d"}],
        "affinity": {"nodeAffinity": {}}, "priorityClassName": "high", "serviceAccountName": "watch",
        "topologySpreadConstraints": [{"maxSkew": 1}], "imagePullSecrets": [{"name": "e"}],
        "securityContext": {"runAsUser": None, "fsGroup": 7},
    }  # fmt: skip
    image = {"digest": f"sha256:{'0' * 64}", "pullPolicy": "Always", "tag": "unused"}
    given = {
        "board": {"enabled": True},
        "pod": pod,
        "image": image,
        "resources": {"board": {"limits": {"memory": "1Gi"}}},
    }
    assert [] == mistakes(LINKED | given)
    made = render(given).named("Deployment", "vllm-watch-board")["spec"]["template"]
    assert ("1", "2") == (made["metadata"]["annotations"]["a"], made["metadata"]["labels"]["b"])
    for name in ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "imagePullSecrets"):
        assert pod[name] == made["spec"][name]
    assert ("high", "watch") == (made["spec"]["priorityClassName"], made["spec"]["serviceAccountName"])
    assert "runAsUser" not in made["spec"]["securityContext"]
    assert (7, True) == (made["spec"]["securityContext"]["fsGroup"], made["spec"]["securityContext"]["runAsNonRoot"])
    [container] = made["spec"]["containers"]
    assert (f"vllm-watch@{image['digest']}", "Always") == (container["image"], container["imagePullPolicy"])
    assert "1Gi" == container["resources"]["limits"]["memory"]


def test_extra_objects_are_templates_and_rules_are_not(render):
    more = {"kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}
    found = render({"extraObjects": [more, "kind: Secret\nmetadata: {name: '{{ .Release.Namespace }}'}"]})
    own = [each for each in found.objects if "labels" not in each["metadata"]]
    assert [("ConfigMap", "watch-more"), ("Secret", "vllm")] == [
        (each["kind"], each["metadata"]["name"]) for each in own
    ]
    rules = json.dumps(found.named("PrometheusRule", "vllm-watch-page"))
    assert "{{ $labels.instance }}" in rules
    assert ".invalid" not in found.texts["templates/rules.yaml"] + found.texts["templates/dashboards.yaml"]


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"links": {"dashboards": "https://g.example.org"}}, r"links\.runbooks .*https://wiki\.example\.org"),
        ({"links": {**LINKED["links"], "dashboards": "http://localhost:3000"}}, r"links\.dashboards .*https://grafana"),
        ({"engines": {"restrict": True}}, r"engines\.restrict .*gateway\.enabled"),
        ({"tls": {"existingSecret": "a"}}, r"tls\.existingSecret .*gateway\.enabled or sidecar\.enabled"),
        ({"login": {"existingSecret": "a"}}, r"login\.existingSecret .*gateway\.enabled or sidecar\.enabled"),
        ({"store": {"url": "redis://a"}}, r"several gateways; .*gateway\.enabled.*gateway\.replicas to 2"),
        ({"ship": {"dataset": "volume"}}, r"ship\.dataset .*gateway\.enabled"),
        ({"gateway": {"enabled": True}, "ship": {"dataset": "volume"}}, r"state\.size .*ship\.dataset.*\b2Gi"),
        (
            {"gateway": {"enabled": True}, "ship": {"existingSecret": "a"}},
            r"ship\.endpoint and ship\.existingSecret .*ship\.dataset to s3://",
        ),
        (
            {"gateway": {"enabled": True}, "ship": {"dataset": "volume"}, "state": {"size": "2Gi"}, "cluster": "a/b"},
            "cluster .*'/'.*ship.dataset",
        ),
        (
            {"gateway": TWO_GATEWAYS, "store": {"existingSecret": "a"}},
            r"store\.existingSecret and store\.user .*store\.url or store\.valkey\.enabled",
        ),
        (
            {"gateway": TWO_GATEWAYS, "store": {"valkey": {"enabled": True}}},
            r"store\.valkey\.enabled .*store\.existingSecret",
        ),
        (
            {"gateway": TWO_GATEWAYS, "store": {"url": "redis://a", "valkey": {"enabled": True}}},
            r"store\.url .*store\.valkey\.enabled .*out\b",
        ),
        (
            {"gateway": TWO_GATEWAYS, "store": {"url": "redis://a", "user": "b"}},
            r"store\.user .*store\.url.*store\.existingSecret",
        ),
        (
            {"gateway": TWO_GATEWAYS | {"autoscaling": {"maxReplicas": 2}}},
            r"gateway\.autoscaling\.maxReplicas .*gateway\.replicas",
        ),
    ],
)
def test_values_that_cannot_work_together_are_refused(given, fault, part):
    done = run_renderer(part, given)
    assert (1, "") == (done.returncode, done.stdout)
    assert re.search(fault, done.stderr), done.stderr


def test_notes_name_what_is_left_to_do(render):
    plain = render({"operatorLabels": {"release": "kps"}}).notes
    assert "runs or restricts" in plain
    assert "WARNING" not in plain
    much = render(SETS["much"][0] | {"operatorLabels": {}, "alertmanagerConfig": {"receiver": "slack"}}).notes
    for text in (
        "WARNING: operatorLabels is empty", "create secret generic my-teams --from-file=teams.yaml",
        "vllm-1: {url: http://vllm-1.vllm:8000}", "alertmanagerConfigMatcherStrategy to type None",
        "kubectl -n vllm delete networkpolicy vllm-watch-engines", "port-forward service/watch-board 9402",
    ):  # fmt: skip
        assert text in much
    several = render(SETS["leased"][0]).notes
    for text in (
        "delete deployment vllm-watch-gateway", "create secret generic watch-store --from-file=password=/dev/stdin",
        yaml.safe_dump(replicas.adapter_rule("vllm")["rules"]["external"][0]["metricsQuery"]).splitlines()[0],
        replicas.adapter_rule("vllm")["rules"]["external"][0]["seriesQuery"], f"as: {replicas.METRIC}",
    ):  # fmt: skip
        assert text in several


def test_own_topology_replaces_that_of_the_gateways(render):
    own = [{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}]
    for given, expected in ({}, replicas.spread()), ({"pod": {"topologySpreadConstraints": own}}, own):
        made = render({"gateway": TWO_GATEWAYS, **given, **FEW}).named("StatefulSet", "vllm-watch-gateway")
        assert expected == made["spec"]["template"]["spec"]["topologySpreadConstraints"]


# ---- values and their schema


@functools.cache
def defaults() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def coalesced(usual: Any, given: Any) -> Any:
    if isinstance(usual, dict) and isinstance(given, dict):
        keys = [*usual, *(key for key in given if key not in usual)]
        made = {key: coalesced(usual.get(key), given[key]) if key in given else usual[key] for key in keys}
        return {key: value for key, value in made.items() if value is not None}
    return given


def mistakes(given: dict[str, Any]) -> list[str]:
    """What the schema says of values, which Helm merges into the defaults first."""
    validator = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
    found = validator.iter_errors(coalesced(defaults(), given))
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def test_the_schema_is_one_and_takes_the_defaults():
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    assert [] == mistakes({})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"gatway": {"enabled": True}}, "'gatway' was unexpected"),
    ({"gateway": {"enable": True}}, "gateway: Additional properties are not allowed ('enable' was unexpected)"),
    ({"gateway": {"enabled": "yes"}}, "gateway.enabled: 'yes' is not of type 'boolean'"),
    ({"engines": {"port": 99999}}, "engines.port: 99999"),
    ({"engines": {"port": "80-80"}}, "engines.port: '80-80'"),
    ({"engines": {"endpoints": []}}, "engines.endpoints: []"),
    ({"engines": {"endpoints": [{"url": "http://vllm:8000"}]}}, "engines.endpoints.0: 'name' is a required property"),
    ({"engines": {"endpoints": [{"name": "a", "url": "vllm:8000"}]}}, "engines.endpoints.0.url: 'vllm:8000'"),
    (
        {"engines": {"podSelector": {"app": "vllm"}}},
        "engines.podSelector: Additional properties are not allowed ('app'",
    ),
    ({"operatorLabels": {"release": 1}}, "operatorLabels.release: 1 is not of type 'string'"),
    ({"commonLabels": {"app.kubernetes.io/name": "x"}}, "commonLabels: "),
    ({"sidecar": {"settings": {"gpu": "nvml"}}}, "sidecar.settings: 'gpu' should not be valid under"),
    ({"interval": "30"}, "interval: '30' does not match"),
    ({"sampleLimits": {"engine": -1}}, "sampleLimits.engine: -1 is less than the minimum of 0"),
    ({"links": {"runbooks": "wiki"}}, "links.runbooks: 'wiki' does not match"),
    ({"alertmanagerConfig": {"receiver": "pager"}}, "alertmanagerConfig.receiver: 'pager' is not one of"),
    ({"state": {"size": "1 GB"}}, "state.size: '1 GB' does not match"),
    ({"image": {"digest": "sha256:1"}}, "image.digest: 'sha256:1' does not match"),
    ({"ship": {"dataset": "/srv/data"}}, "ship.dataset: '/srv/data' does not match"),
    ({"ship": {"endpoint": "http://s3.example.org"}}, "ship.endpoint: 'http://s3.example.org' does not match"),
    ({"ship": {"datset": "volume"}}, "ship: Additional properties are not allowed ('datset' was unexpected)"),
    ({"tls": {"existingSecret": "A b"}}, "tls.existingSecret: 'A b' does not match"),
]


@pytest.mark.parametrize(("given", "said"), WRONG, ids=[json.dumps(given) for given, _ in WRONG])
def test_a_wrong_value_is_refused_by_its_name(given, said):
    [mistake] = mistakes(given)
    assert said in mistake


def test_templates_read_only_values_that_exist():
    """A misspelt value renders as nothing, silently."""
    for path in (CHART / "templates").iterdir():
        for name in re.findall(r"\.Values\.([\w.]+)", path.read_text()):
            found: Any = defaults()
            for word in name.split("."):
                assert word in found, f"{path.name}: {name}"
                found = found[word]


def test_every_value_has_a_default_a_type_and_a_sentence():
    rows = values.table({"a": {}}, {})
    assert len(rows) == len({row.path for row in rows})
    for row in rows:
        assert row.default is not None, "Helm drops a null among the defaults"
        assert row.help[0].isupper()
        assert row.help.endswith(".")
        assert {"type", "enum", "anyOf"} & set(row.schema), row.path
        assert row.path.split(".")[0] in defaults()


# ---- the printed files


def test_expressions_never_come_from_text_of_ours():
    made = {"a": "{{ x }} # y", "b": template.Expr(".Values.b | quote"), "c": [template.When(".Values.c", {"d": 1})]}
    text = template.text_of(
        made | {"e": template.YamlBlock("toYaml .Values.e"), "f": template.Lines('include "g" .')}, 2
    )
    assert text == (
        "  a: '{{ x }} # y'\n  b: {{ .Values.b | quote }}\n  c:\n    {{- if .Values.c }}\n    - d: 1\n    {{- end }}\n"
        '  e: {{- toYaml .Values.e | nindent 4 }}\n  {{- include "g" . | nindent 2 }}'
    )


@pytest.mark.parametrize("name", ["much", "default"])
def test_a_release_fits_into_its_secret(name, render):
    """Helm keeps a release, the chart with it, as one Secret: JSON in gzip in base64."""
    size = len(stored(render(SETS[name][0])))
    assert size < LIMIT_BYTES
    said = re.search(r"(\d+) KiB", GUIDE.read_text())
    assert said
    assert name != "much" or abs(size / 1024 - int(said[1])) < 30, size // 1024


def stored(rendered: Rendered) -> bytes:
    """The data of the Secret, as Helm's pkg/storage/driver/util.go encodes it."""

    def of(folder: str) -> list[dict[str, str]]:
        paths = sorted(path for path in (CHART / folder).rglob("*") if path.is_file())
        return [
            {"name": str(path.relative_to(CHART)), "data": base64.b64encode(path.read_bytes()).decode()}
            for path in paths
        ]

    release = {
        "name": "watch", "namespace": "vllm", "version": 1,
        "chart": {
            "metadata": yaml.safe_load((CHART / "Chart.yaml").read_text()), "values": defaults(),
            "templates": of("templates"), "files": of("files"),
            "schema": base64.b64encode((CHART / "values.schema.json").read_bytes()).decode(),
        },
        "manifest": "".join(rendered.texts.values()), "info": {"notes": rendered.notes},
    }  # fmt: skip
    return base64.b64encode(gzip.compress(json.dumps(release).encode(), 9))


def test_the_command_writes_the_chart_of_the_checkout(tmp_path):
    def written(*options: str) -> Any:
        return CliRunner().invoke(cli.main, ["kubernetes", "chart", "--out", str(tmp_path / "chart"), *options])

    assert 0 == written().exit_code

    def digests(folder: Path) -> dict[str, str]:
        paths = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    assert digests(CHART) == digests(tmp_path / "chart")
    (tmp_path / "thresholds.yml").write_text("thresholds: {queue_length: 77}\n")
    assert 0 == written("--thresholds", str(tmp_path / "thresholds.yml")).exit_code
    assert re.search(r">\s+77\b", (tmp_path / "chart/files/rules/ticket.yaml").read_text())
    (tmp_path / "chart/Chart.yaml").write_text("name: another\n")
    refused = written()
    assert 2 == refused.exit_code
    assert re.search(r"/chart/.* \(and \d+ more\) .*--out.*--force", refused.stderr)


def test_values_of_the_guide_are_accepted_and_render(render):
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        given = yaml.safe_load(block)
        assert [] == mistakes(given)
        assert render(given).objects
