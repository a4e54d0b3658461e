"""Who may do what in the compose stack, read off what compose makes of its files, and what compose.secure.yml adds:
certificates, passwords, rights.

What runs of it is in tests/live/test_compose.py."""

from __future__ import annotations

import shutil
import ssl
import stat
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from exporters.sidecar_config import SidecarConfig
from stack import config
from stack.config import BadConfig
from stack.deploy import certificates, credentials
from stack.gateway.config import GatewayConfig
from stack.lab.install import InstalledPart
from tests.support.compose_files import CPU, DEPLOY, READY, REPLICAS, ROOT, SECURE, WATCH, read, resolved
from tests.support.compose_mig import GIVEN, MIG

MIG_SECURE = DEPLOY / "compose.mig.secure.yml"
COMBINATIONS = {
    "gpu": (), "cpu": (CPU,), "mig": (MIG,), "secure": (SECURE,), "cpu-secure": (CPU, SECURE),
    "mig-secure": (MIG, SECURE, MIG_SECURE), "watch": (WATCH,), "replicas": (REPLICAS,),
    "cpu-replicas": (CPU, REPLICAS),
}  # fmt: skip
NOW = datetime(2026, 6, 1, tzinfo=UTC)
FOLDERS = ("authority", "public", *credentials.SERVICES)
TLS = "/etc/vllm-watch/tls"


@pytest.fixture(scope="module", params=COMBINATIONS)
def stack(request: pytest.FixtureRequest, part: Callable[[str], InstalledPart]) -> Any:
    """What compose makes of one combination of the files, those that run only when asked for included."""
    found = resolved(part, {**GIVEN, "COMPOSE_PROFILES": "cli"}, *COMBINATIONS[request.param])
    found["name"] = request.param
    return found


# --- who may do what

# Of each service: its user, the networks it shares with others, and the volumes and secrets it sees. Teams' own names
# are taken off, and TLS beside.
NOBODY, OURS, ROOT_USER = "65534:65534", "10001:0", "0:0"
RIGHTS: dict[str, tuple[str, set[str], set[str]]] = {
    "model": (ROOT_USER, {"fetch"}, {"models", "hf_token"}),
    "init": (OURS, set(), {"secrets"}),
    "vllm": (ROOT_USER, {"engine"}, {"models:ro", "engine-cache"}),
    "gateway": (OURS, {"engine", "clients"}, {"secrets:ro", "request-log"}),
    "sidecar": (OURS, {"engine"}, {"request-log:ro", "sidecar-state"}),
    "board": (OURS, {"watch"}, set()),
    "prometheus": (NOBODY, {"engine", "watch", "alerts"}, {"prometheus-data"}),
    "alertmanager": (
        NOBODY,
        {"alerts"},
        {"alertmanager-data", "alertmanager_page", "alertmanager_ticket", "alertmanager_deadman"},
    ),
    "grafana": ("472:0", {"watch", "traces"}, {"secrets:ro", "grafana-data"}),
    "otelcol": ("10001:10001", {"engine", "traces"}, set()),
    "jaeger": ("10001:10001", {"traces"}, set()),
    "cli": (OURS, {"engine", "watch", "alerts"}, {"secrets:ro", "request-log:ro"}),
    "rules": (OURS, set(), {"rules"}),
    "credentials": (ROOT_USER, set(), {f"tls-{folder}" for folder in FOLDERS}),
}
# Of compose.watch.yml, whose engines are outside of the stack.
WATCH_RIGHTS = RIGHTS | {
    "init": (OURS, {"engines"}, {"secrets", "sidecar-state", "targets"}),
    "sidecar": (OURS, {"engine", "engines"}, {"sidecar-state"}),
    "prometheus": (NOBODY, {"engine", "engines", "watch", "alerts"}, {"prometheus-data", "targets:ro"}),
    "grafana": ("472:0", {"watch"}, {"secrets:ro", "grafana-data"}),
}
# Of compose.replicas.yml, whose second gateway and sidecar have volumes of their own.
REPLICAS_RIGHTS = RIGHTS | {
    "init": (OURS, set(), {"secrets", "store"}),
    "store": (OURS, {"store"}, {"store:ro"}),
    "haproxy": ("99:99", {"clients", "gateways"}, set()),
    "gateway": (OURS, {"engine", "gateways", "store"}, {"secrets:ro", "store:ro", "request-log"}),
    "gateway-1": (OURS, {"engine", "gateways", "store"}, {"secrets:ro", "store:ro", "request-log-1"}),
    "sidecar-1": (OURS, {"engine"}, {"request-log-1:ro", "sidecar-state-1"}),
    "cli": (OURS, {"engine", "watch", "alerts"}, {"secrets:ro", "request-log:ro", "request-log-1:ro"}),
}
POWERS = {"model": ["DAC_OVERRIDE"], "credentials": ["CHOWN", "DAC_OVERRIDE", "FOWNER"]}
UNLIMITED = ("vllm",)  # how much memory an engine needs depends on its model


def kind(service: str) -> str:
    return service.split("-team-")[0]


def seen(service: dict[str, Any]) -> set[str]:
    """Volumes and secrets that it sees, with :ro where it may only read; what it has of TLS is another table's."""
    volumes = [mount for mount in service.get("volumes", ()) if mount["type"] == "volume" and mount["target"] != TLS]
    return {mount["source"].split("-team-")[0] + (":ro" if mount.get("read_only") else "") for mount in volumes} | {
        secret["source"] for secret in service.get("secrets", ())
    }


@pytest.mark.compose
def test_each_service_has_the_rights_of_the_table_and_no_others(stack: Any) -> None:
    """Of MIG a service sees the networks of teams in place of `engine`, and the sidecar's file is made."""
    mig = "mig" in stack["name"]
    for name, service in stack["services"].items():
        tables = {"watch": WATCH_RIGHTS, "replicas": REPLICAS_RIGHTS}
        user, networks, data = tables.get(stack["name"].removeprefix("cpu-"), RIGHTS)[kind(name)]
        assert user == service["user"], name
        found = {network.split("-")[0] for network in service.get("networks") or {}}
        if mig:
            networks = {{"engine": "team"}.get(network, network) for network in networks}
            found -= {"engine"} if kind(name) in ("prometheus", "otelcol", "cli", "sidecar") else set()
            data = data | ({"sidecar-state"} if name == "init" else set())
        assert networks == found, name
        rules = {"rules:ro"} if name == "prometheus" and "secure" in stack["name"] else set()
        assert data | rules == seen(service), name


@pytest.mark.compose
def test_every_service_is_confined_and_limited(stack: Any) -> None:
    """Nothing is privileged, nothing sees the host's Docker, network or processes, nothing may grow without bound."""
    for name, service in stack["services"].items():
        assert (True, ["ALL"], ["no-new-privileges:true"]) == (
            service["read_only"],
            service["cap_drop"],
            service["security_opt"],
        ), name
        assert POWERS.get(kind(name), []) == service.get("cap_add", []), name
        assert service["user"] != ROOT_USER or kind(name) in ("model", "vllm", "credentials"), name
        assert (
            not {"privileged", "pid", "ipc", "uts", "userns_mode", "devices", "cgroup_parent", "volumes_from"}
            & service.keys()
        ), name
        assert service.get("network_mode") in (None, "none"), name
        assert 0 < service["pids_limit"] <= 32768, name
        assert kind(name) in UNLIMITED or 0 < int(service["mem_limit"]) <= 8 << 30, name
        assert "max-size" in service["logging"]["options"], name
        binds = [mount for mount in service.get("volumes", ()) if mount["type"] == "bind"]
        assert all(
            mount["read_only"] and (mount["source"] == "/dev/null" or ROOT in Path(mount["source"]).parents)
            for mount in binds
        ), name
        assert {"127.0.0.1"} >= {port["host_ip"] for port in service.get("ports", ())}, name


@pytest.mark.compose
def test_no_secret_comes_by_environment_or_command(stack: Any) -> None:
    """Words that name one stand only where a file is meant."""
    words = ("password", "token", "secret", "api_key", "api-key")
    for name, service in stack["services"].items():
        said = [
            *(f"{key}={value}" for key, value in (service.get("environment") or {}).items()),
            *(service.get("command") or ()),
        ]
        named = [text for text in said if any(word in text.lower() for word in words)]
        counted = ("--enable-prompt-tokens-details", "--custom-histogram-buckets.")  # tokens of a model
        meant = [text for text in named if not text.removeprefix("VLLM_WATCH_ENGINE_BUCKETS=").startswith(counted)]
        assert all("/run/secrets/" in text or "/var/lib/vllm-watch/secrets/" in text for text in meant), (name, meant)


@pytest.mark.compose
def test_a_networks_members_all_have_somebody_to_talk_to_on_it(part: Callable[[str], InstalledPart]) -> None:
    """Only the gateway and the download are alone on theirs, which is their way out."""
    services = resolved(part, {})["services"]
    members = {
        network: {name for name, s in services.items() if network in (s.get("networks") or {})}
        for network in resolved(part, {})["networks"]
    }
    assert {"clients": {"gateway"}, "fetch": {"model"}} == {
        network: alone for network, alone in members.items() if len(alone) == 1
    }
    assert {"gateway", "sidecar", "prometheus", "otelcol", "vllm"} == members["engine"]


# --- what compose.secure.yml adds


@pytest.mark.compose
@pytest.mark.parametrize(
    "overlays", [o for n, o in COMBINATIONS.items() if "secure" in n], ids=[n for n in COMBINATIONS if "secure" in n]
)
def test_service_sees_its_own_certificate_and_password(
    part: Callable[[str], InstalledPart], overlays: tuple[Path, ...]
) -> None:
    """Each service sees its own certificate and password and no others."""
    services = resolved(part, {**GIVEN, "COMPOSE_PROFILES": "cli"}, *overlays)["services"]
    own = {"cli": "tls-operator"} | {name: "tls-public" for name in services if kind(name) == "vllm"}
    for name, service in services.items():
        mounts = [mount for mount in service.get("volumes", ()) if mount["source"].startswith("tls-")]
        if name == "credentials":
            assert {f"/credentials/{mount['source'].removeprefix('tls-')}" for mount in mounts} == {
                mount["target"] for mount in mounts
            }
        elif kind(name) in credentials.SERVICES or name in own:
            assert [(own.get(name, f"tls-{name}"), TLS, True)] == [
                (mount["source"], mount["target"], mount["read_only"]) for mount in mounts
            ], name
            assert "service_completed_successfully" == service["depends_on"]["credentials"]["condition"], name
        else:
            assert [] == mounts, name
    assert {f"tls-{name}" for name in services if kind(name) in credentials.SERVICES} <= {
        m["source"] for m in services["credentials"]["volumes"]
    }


@pytest.mark.compose
def test_ports_are_bound_as_told(part: Callable[[str], InstalledPart]) -> None:
    """Ports are bound where one says and the page without a login nowhere."""
    for overlays in ((SECURE,), (MIG, SECURE, MIG_SECURE)):
        services = resolved(part, {**GIVEN, "VLLM_WATCH_BIND": "192.0.2.7"}, *overlays)["services"]
        assert {"192.0.2.7"} == {port["host_ip"] for service in services.values() for port in service.get("ports", ())}
        assert not services["jaeger"].get("ports")
    assert {"127.0.0.1"} == {
        port["host_ip"]
        for s in resolved(part, {"VLLM_WATCH_BIND": "192.0.2.7"})["services"].values()
        for port in s.get("ports", ())
    }


@pytest.mark.compose
def test_commands_say_what_those_of_the_base_file_say(part: Callable[[str], InstalledPart]) -> None:
    """Besides what is meant to differ: addresses with https, and the files of logins."""
    base, secure = (resolved(part, {}, *overlays)["services"] for overlays in ((), (SECURE,)))
    plain = {
        word
        for name in ("prometheus", "alertmanager")
        for word in base[name]["command"]
        if not word.startswith("--web.external-url")
    }
    assert plain <= {word for name in ("prometheus", "alertmanager") for word in secure[name]["command"]}
    for name in ("prometheus", "alertmanager"):
        assert f"--web.config.file={TLS}/web.yml" in secure[name]["command"]
        assert len(base[name]["command"]) + 1 == len(secure[name]["command"])
    assert {name for name in base if base[name].get("command") != secure[name].get("command")} == {
        "prometheus",
        "alertmanager",
        "board",
    }
    for name, service in base.items():
        timing = [
            {key: value for key, value in s.get("healthcheck", {}).items() if key != "test"}
            for s in (service, secure[name])
        ]
        assert timing[0] == timing[1], name


def _without_tls(found: Any) -> Any:
    """A document as it would be without TLS and logins."""
    if isinstance(found, dict):
        taken = ("tls", "tls_config", "basic_auth", "scheme", "basicAuth", "basicAuthUser", "secureJsonData",
            "tlsAuthWithCACert", "ca_file",
                 "web_config", "metrics_web_config")  # fmt: skip
        return {key: _without_tls(value) for key, value in found.items() if key not in taken}
    if isinstance(found, list):
        return [_without_tls(one) for one in found]
    return found.replace("https://", "http://") if isinstance(found, str) else found


@pytest.mark.parametrize(
    ("plain", "secure"),
    [
        ("gateway.yaml", "gateway.yaml"),
        ("sidecar.yaml", "sidecar.yaml"),
        ("prometheus/prometheus.yml", "prometheus/prometheus.yml"),
        ("otelcol/config.yaml", "otelcol/config.yaml"),
        ("grafana/provisioning/datasources/datasources.yml", "grafana/datasources.yml"),
        ("mig/gateway.yaml", "mig/gateway.yaml"),
        ("mig/sidecar.yaml", "mig/sidecar.yaml"),
        ("mig/prometheus/prometheus.yml", "mig/prometheus/prometheus.yml"),
    ],
)
def test_tls_file_says_otherwise_what_the_plain_says(plain: str, secure: str) -> None:
    """A file with TLS says otherwise what the one without says."""
    assert read(DEPLOY / plain) == _without_tls(read(DEPLOY / "secure" / secure))
    assert read(DEPLOY / plain) != read(DEPLOY / "secure" / secure)


def test_our_programs_read_their_files_with_tls() -> None:
    gateway = config.load(DEPLOY / "secure/gateway.yaml", GatewayConfig)
    assert (f"{TLS}/clients.yml", f"{TLS}/web.yml") == (gateway.web_config, gateway.metrics_web_config)
    assert f"{TLS}/web.yml" == config.load(DEPLOY / "secure/sidecar.yaml", SidecarConfig).web_config


@pytest.mark.prometheus
def test_prometheus_logs_in_everywhere_but_two(part: Callable[[str], InstalledPart]) -> None:
    """Prometheus asks everybody with a login but the two that have none."""
    for file in ("prometheus/prometheus.yml", "mig/prometheus/prometheus.yml"):
        jobs = {job["job_name"]: job for job in read(DEPLOY / "secure" / file)["scrape_configs"]}
        assert {"vllm", "otelcol"} == {name for name, job in jobs.items() if job.get("scheme") != "https"}
        assert all(
            job["basic_auth"]["password_file"] == f"{TLS}/password"
            for name, job in jobs.items()
            if name not in ("vllm", "otelcol")
        )
        checked = [part("promtool").path, "check", "config", "--syntax-only", DEPLOY / "secure" / file]
        done = subprocess.run(checked, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.collector
def test_the_collector_accepts_its_file_with_tls(part: Callable[[str], InstalledPart], tmp_path: Path) -> None:
    """Its certificates are looked for when it starts, not when it validates."""
    done = subprocess.run(
        [part("otelcol").path, "validate", f"--config={DEPLOY / 'secure/otelcol/config.yaml'}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stdout + done.stderr)


# --- certificates and passwords


class Made:
    """A stack's folders, and who was given what."""

    def __init__(self, root: Path) -> None:
        self.root, self.given = root, dict[str, tuple[int, int]]()
        for folder in FOLDERS:
            (root / folder).mkdir()

    def make(self, now: datetime = NOW, *names: str) -> dict[str, str]:
        """Runs it; every file by its path."""
        credentials.make(
            self.root,
            now,
            list(names),
            chown=lambda path, user, group: self.given.__setitem__(str(path.relative_to(self.root)), (user, group)),
        )
        return {str(path.relative_to(self.root)): path.read_text() for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def test_a_second_start_changes_nothing(made: Made) -> None:
    assert made.make() == made.make(NOW + timedelta(days=1))


def test_every_file_can_be_opened_by_its_service_alone(made: Made) -> None:
    """But for the authority's certificate, which is no secret; its key is root's, and no service sees it."""
    files = made.make()
    assert {0o400} == {
        stat.S_IMODE((made.root / file).stat().st_mode) for file in files if file.split("/")[0] in credentials.SERVICES
    }
    for name, service in credentials.SERVICES.items():
        assert 0o700 == stat.S_IMODE((made.root / name).stat().st_mode)
        assert {service.owner} == {owner for path, owner in made.given.items() if path.split("/")[0] == name}
    assert (0o700, 0o400) == tuple(
        stat.S_IMODE((made.root / path).stat().st_mode) for path in ("authority", "authority/ca.key")
    )
    assert ["public/ca.crt"] == [file for file in files if file.startswith("public/")]


def test_users_have_passwords_of_their_own(made: Made) -> None:
    """Each user has a password of its own that stands nowhere else."""
    files = made.make()
    passwords = {path: text for path, text in files.items() if path.endswith("/password")}
    assert {f"{user}/password" for user in credentials.USERS} == set(passwords)
    assert len(set(passwords.values())) == len(passwords)
    assert all(len(password) >= 32 for password in passwords.values())
    for path, text in files.items():
        assert path in passwords or not [password for password in passwords.values() if password in text], path


def test_listener_knows_hashes_of_its_users_only(made: Made) -> None:
    """A listener knows the hashes of those who may ask it and nobody else."""
    files = made.make()
    for name, service in credentials.SERVICES.items():
        if service.asked_by:
            users = read(made.root / name / "web.yml")["basic_auth_users"]
            assert set(service.asked_by) == set(users), name
            assert bcrypt.checkpw(
                files[f"{service.asked_by[0]}/password"].encode(), users[service.asked_by[0]].encode()
            )
    assert "basic_auth_users" not in read(made.root / "gateway/clients.yml")


@pytest.mark.prometheus
def test_prometheus_and_our_own_programs_accept_what_was_made(made: Made, part: Callable[[str], InstalledPart]) -> None:
    from exporters.net.listener_auth import ListenerAuth

    made.make()
    for name, service in credentials.SERVICES.items():
        if service.asked_by:
            checked = [part("promtool").path, "check", "web-config", made.root / name / "web.yml"]
            assert 0 == subprocess.run(checked, capture_output=True, check=False).returncode
            assert ListenerAuth(made.root / name / "web.yml").context()
    assert ListenerAuth(made.root / "gateway/clients.yml", tls_only=True).context()


def test_certificate_names_its_service_and_host(made: Made) -> None:
    """A certificate stands for its service and for this host's names."""
    files = made.make(NOW, "gpu1.example.org", "192.0.2.7")
    assert {"gateway", "localhost", "127.0.0.1", "::1", "gpu1.example.org", "192.0.2.7"} == certificates.names_of(
        files["gateway/tls.crt"]
    )
    signer = certificates.Pair(files["authority/ca.crt"])
    assert all(certificates.is_of(text, signer) for path, text in files.items() if path.endswith("tls.crt"))
    trusting = ssl.create_default_context(cadata=files["public/ca.crt"])
    assert 1 == trusting.cert_store_stats()["x509_ca"]


def test_certificate_renews_sixty_days_before_its_end(made: Made) -> None:
    """And nothing else is: no password, no file of logins, no authority."""
    first = made.make()
    just_before, after = (
        NOW + timedelta(days=certificates.LEAF_DAYS - certificates.RENEW_DAYS + days) for days in (-0.1, 0.1)
    )
    assert first == made.make(just_before)
    renewed = made.make(after)
    changed = {path for path in first if first[path] != renewed[path]}
    assert {
        f"{name}/tls.{end}"
        for name, service in credentials.SERVICES.items()
        if service.listens
        for end in ("crt", "key")
    } == changed
    assert {"board/tls.crt", "board/tls.key"} <= {
        path for path, text in made.make(after, "other.example").items() if text != renewed[path]
    }


def own_pair(folder: Path, *how: str) -> None:
    """In place of what is there, which its owner may read only; root may write it all the same."""
    key, certificate = folder / "tls.key", folder / "tls.crt"
    for file in (key, certificate):
        file.unlink()
    subprocess.run(
        ["openssl", "req", "-x509", *how, "-subj", "/CN=mine", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )


def test_an_operators_own_certificate_and_logins_stay(made: Made) -> None:
    """Of another authority, whatever its names and however old; an edited web.yml too."""
    made.make()
    own_pair(made.root / "gateway", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "5")
    (made.root / "gateway/web.yml").chmod(0o600)
    (made.root / "gateway/web.yml").write_text("basic_auth_users: {}\n")
    mine = {name: (made.root / "gateway" / name).read_text() for name in ("tls.crt", "tls.key", "web.yml")}
    files = made.make(NOW, "other.example")
    assert mine == {name: files[f"gateway/{name}"] for name in mine}


def test_a_certificate_whose_key_was_lost_is_made_again(made: Made) -> None:
    """Nothing can listen with half a pair, and a start that was cut short between the two leaves one."""
    first = made.make()
    (made.root / "sidecar/tls.key").unlink()
    (made.root / "board/tls.key").chmod(0o600)
    (made.root / "board/tls.key").write_text(first["gateway/tls.key"])
    second = made.make()
    for name in ("sidecar", "board"):
        assert certificates.fits(second[f"{name}/tls.crt"], second[f"{name}/tls.key"])
    assert {f"{name}/tls.{end}" for name in ("sidecar", "board") for end in ("crt", "key")} == {
        p for p in first if first[p] != second[p]
    }


@pytest.mark.parametrize("key", [["-passout", "pass:word"], ["-nodes"]], ids=["locked", "other"])
def test_mismatched_key_is_reported(made: Made, key: list[str]) -> None:
    """Before a program fails over it: one that wants a password, and one of another certificate."""
    made.make()
    folder = made.root / "grafana"
    own_pair(folder, "-newkey", "rsa:2048", *key)
    if "-nodes" in key:
        made.make()  # it is right: a key need not be of a curve
        (folder / "tls.key").unlink()
        (folder / "tls.key").write_text((made.root / "board/tls.key").read_text())
    with pytest.raises(
        BadConfig,
        match=r"grafana/tls\.key is not the key of your tls\.crt beside it, or wants a password; put both there",
    ) as told:
        made.make()
    assert "\n" not in str(told.value)


def test_removed_password_is_made_anew_everywhere(made: Made) -> None:
    """The way of docs/guides/hardening.md; the others' passwords stay."""
    first = made.make()
    for path in (made.root / "operator/password", *made.root.glob("*/web.yml")):
        path.unlink()
    second = made.make()
    passwords = {path for path in first if path.endswith("password")}
    assert {"operator/password"} == {path for path in passwords if first[path] != second[path]}
    for name, service in credentials.SERVICES.items():
        for user in service.asked_by:
            known = read(made.root / name / "web.yml")["basic_auth_users"][user]
            assert bcrypt.checkpw(second[f"{user}/password"].encode(), known.encode()), (name, user)


def test_a_new_authority_signs_everybody_anew(made: Made) -> None:
    """Once its volume is removed; passwords stay."""
    first = made.make()
    for file in ("ca.crt", "ca.key"):
        (made.root / "authority" / file).unlink()
    second = made.make()
    signer = certificates.Pair(second["authority/ca.crt"])
    assert all(certificates.is_of(text, signer) for path, text in second.items() if path.endswith("tls.crt"))
    assert {second["authority/ca.crt"]} == {text for path, text in second.items() if path.endswith("ca.crt")}
    assert {path: text for path, text in first.items() if path.endswith("password")}.items() <= second.items()


def test_an_authority_near_its_end_is_told_with_the_way_out(made: Made) -> None:
    made.make()
    with pytest.raises(BadConfig, match="remove the volume tls-authority"):
        made.make(NOW + timedelta(days=certificates.AUTHORITY_DAYS - certificates.RENEW_DAYS + 1))


@pytest.mark.parametrize("variable", ["VLLM_WATCH_HOSTNAME", "VLLM_WATCH_BIND"])
@pytest.mark.parametrize("wrong", ["a b", "https://gpu1", "a,b", "*"])
def test_foreign_host_name_is_refused_by_its_variable(variable: str, wrong: str) -> None:
    """What is no name of this host is refused by the name of its variable."""
    with pytest.raises(BadConfig, match=f"{variable}: .* not one name or address"):
        credentials.further_names({variable: wrong})


def test_wildcard_and_loopback_are_no_names() -> None:
    """Addresses that stand for all or for this machine are no further names."""
    assert ["192.0.2.7", "gpu1"] == credentials.further_names(
        {"VLLM_WATCH_HOSTNAME": "gpu1", "VLLM_WATCH_BIND": "192.0.2.7"}
    )
    assert [] == credentials.further_names({"VLLM_WATCH_HOSTNAME": "localhost", "VLLM_WATCH_BIND": "0.0.0.0"})  # noqa: S104
    assert ["2001:db8::7"] == credentials.further_names({"VLLM_WATCH_BIND": "[2001:db8::7]"})


def test_a_folder_of_nobody_we_know_is_refused(made: Made) -> None:
    (made.root / "gatway").mkdir()
    with pytest.raises(BadConfig, match="gatway is no service"):
        made.make()


# --- the preflight

LAN = {"VLLM_WATCH_BIND": "192.0.2.7"}


@pytest.mark.parametrize(
    ("mode", "folder_mode", "settings", "arguments", "status", "says"),
    [
        (0o600, 0o755, {}, (), 0, None),
        (0o600, 0o755, {"VLLM_WATCH_HF_TOKEN_FILE": "{file}"}, (), 0, None),
        (0o644, 0o755, {"VLLM_WATCH_HF_TOKEN_FILE": "{file}"}, (), 0, "can be read by everybody"),
        (0o644, 0o755, {"VLLM_WATCH_PAGE_FILE": "{file}"}, (), 0, "Move it into a folder that only you may enter"),
        (0o644, 0o700, {"VLLM_WATCH_PAGE_FILE": "{file}"}, (), 0, None),
        (0o600, 0o700, {"VLLM_WATCH_TICKET_FILE": "{file}"}, (), 1, "cannot be read by Alertmanager"),
        (0o600, 0o700, {"VLLM_WATCH_DEADMAN_FILE": "{file}.not"}, (), 1, "is no file"),
        (0o600, 0o755, LAN, (), 0, "without compose.secure.yml"),
        (0o600, 0o755, LAN, ("secure",), 0, "VLLM_WATCH_HOSTNAME is not set"),
        (0o600, 0o755, LAN | {"VLLM_WATCH_HOSTNAME": "gpu1"}, ("secure",), 0, None),
        (
            0o600,
            0o755,
            LAN | {"VLLM_WATCH_HOSTNAME": "gpu1", "COMPOSE_FILE": "docker-compose.yml:stack/deploy/compose.secure.yml"},
            (),
            0,
            None,
        ),
        (0o600, 0o755, {"VLLM_WATCH_BIND": "127.0.0.2"}, (), 0, None),
    ],
)
def test_preflight_warns_of_open_secrets_and_ports(
    tmp_path: Path,
    mode: int,
    folder_mode: int,
    settings: dict[str, str],
    arguments: tuple[str, ...],
    status: int,
    says: str | None,
) -> None:
    """A warning leaves the status as it is; what would not work is missing."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in READY.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    for tool in ("sh", "sort", "head", "sed", "grep", "find"):
        (programs / tool).symlink_to(shutil.which(tool) or tool)
    file = tmp_path / "secrets/one"
    file.parent.mkdir(mode=folder_mode)
    file.write_text("x")
    file.chmod(mode)
    environment = {"PATH": str(programs)} | {name: value.format(file=file) for name, value in settings.items()}
    done = subprocess.run(
        ["/bin/sh", DEPLOY / "preflight.sh", "cpu", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (status, "") == (done.returncode, done.stderr), done.stdout
    assert (says or "ok") in done.stdout
    assert says or "warning" not in done.stdout
