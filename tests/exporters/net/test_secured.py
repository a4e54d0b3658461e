"""The whole chain with TLS and logins on every listener: a real Prometheus and a real Alertmanager, our gateway,
sidecar and board, and a private authority that none of the system's trusts. The engine is a fake: two pages of a real
one, behind TLS and a key."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bcrypt
import pytest
import yaml
from click.testing import CliRunner

from stack import cli
from stack.gateway import make_key
from tests.support.authority import Authority
from tests.support.wait import eventually

ROOT = Path(__file__).parents[3]
PAGES = [(ROOT / "tests/golden" / f"0.32.0-preempt-{when}-load.prom").read_bytes() for when in ("under", "after")]
SERVERS = ("prometheus", "alertmanager", "gateway", "figures", "sidecar", "board")
LOGINS = tuple(name for name in SERVERS if name != "gateway")  # its clients bring keys
SECRETS = {name: f"{name}-password-6d1f" for name in LOGINS} | {
    "engine": "engine-key-6d1f",
    "events": "events-token-6d1f",
}
OPEN = {"sidecar": "/-/ready", "figures": "/-/healthy", "board": "/-/healthy"}

pytestmark = [pytest.mark.prometheus]


class FakeSecuredEngine(BaseHTTPRequestHandler):
    """Answers who has the key, over TLS; its counters are those of one real page, and later of another."""

    looks = 0

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {SECRETS['engine']}":
            return self._answer(401, b"{}")
        match self.path:
            case "/metrics":
                FakeSecuredEngine.looks += 1
                return self._answer(200, PAGES[self.looks > 8], "text/plain; version=0.0.4")
            case "/version":
                return self._answer(200, b'{"version": "0.32.0"}')
            case _:
                return self._answer(200, b'{"data": []}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        whole = {"choices": [{"finish_reason": "length"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        self._answer(
            *(
                (200, json.dumps(whole).encode())
                if self.headers.get("Authorization") == f"Bearer {SECRETS['engine']}"
                else (401, b"{}")
            )
        )

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing to say."""


def engine(pair: Any) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeSecuredEngine)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def written(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def configured(folder: Path, authority: Authority, port: Any, engine_url: str) -> SimpleNamespace:
    """Every file of the chain, and the addresses."""
    urls = {name: f"https://127.0.0.1:{port()}" for name in SERVERS}
    listen = {name: url.removeprefix("https://") for name, url in urls.items()}
    key, hashed = make_key("demo")
    for name, secret in SECRETS.items():
        written(folder / f"{name}.secret", secret + "\n")
    for name in SERVERS:
        pair = authority.pair(name)
        web: dict[str, Any] = {"tls_server_config": {"cert_file": pair.cert.name, "key_file": pair.key.name}}
        if name in LOGINS:
            web["basic_auth_users"] = {"watcher": bcrypt.hashpw(SECRETS[name].encode(), bcrypt.gensalt(4)).decode()}
        written(folder / f"{name}.web.yml", web)
    tls = {"ca_file": "ca.pem"}
    ways = {
        name: {"basic_auth": {"username": "watcher", "password_file": f"{name}.secret"}, "tls_config": tls}
        for name in LOGINS
    }
    ways["engine"] = {"authorization": {"credentials_file": "engine.secret"}, "tls_config": tls}
    for name, way in ways.items():
        written(folder / f"{name}.http.yml", way)
    targets = {
        "vllm-gateway": ("figures", listen["figures"]),
        "vllm-watch-sidecar": ("sidecar", listen["sidecar"]),
        "vllm": ("engine", engine_url[8:]),
    }
    jobs = [
        {"job_name": job, "scheme": "https", "static_configs": [{"targets": [at]}], **ways[way]}
        for job, (way, at) in targets.items()
    ]
    manager = {"scheme": "https", "static_configs": [{"targets": [listen["alertmanager"]]}], **ways["alertmanager"]}
    written(
        folder / "prometheus.yml",
        {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": ["rules.yml"],
            "scrape_configs": jobs,
            "alerting": {"alertmanagers": [manager]},
        },
    )
    rule = {"alert": "VLLMWatchdog", "expr": "vector(1)", "labels": {"severity": "info"}}
    written(folder / "rules.yml", {"groups": [{"name": "one", "rules": [rule]}]})
    written(folder / "alertmanager.yml", {"route": {"receiver": "none"}, "receivers": [{"name": "none"}]})
    written(folder / "teams.yaml", {"teams": {"demo": {"keys": [hashed]}}})
    written(
        folder / "gateway.yaml",
        {
            "listen": listen["gateway"],
            "web_config": "gateway.web.yml",
            "metrics_listen": listen["figures"],
            "metrics_web_config": "figures.web.yml",
            "upstream": engine_url,
            "upstream_ca_file": "ca.pem",
            "upstream_key_file": "engine.secret",
        },
    )
    written(folder / "sidecar.yaml", {
        "listen": listen["sidecar"], "web_config": "sidecar.web.yml", "gpu": "off", "engine_interval_s": 0.5,
        "requests_log": [str(folder / "requests.jsonl")], "events": str(folder / "events.jsonl"),
        "events_token_file": str(folder / "events.secret"),
        "engines": [{"name": "one", "url": engine_url, "http_config": "engine.http.yml"}],
    })  # fmt: skip
    return SimpleNamespace(
        folder=folder, urls=urls, listen=listen, key=key, authority=authority, engine=engine_url, pids={}
    )


def commands(it: SimpleNamespace, part: Any) -> dict[str, list[str]]:
    ours, at = [sys.executable, "-m", "stack.cli"], it.folder
    return {
        "alertmanager": [str(part("alertmanager").path), f"--config.file={at}/alertmanager.yml",
            f"--storage.path={at}/am",
                         "--cluster.listen-address=",
                         f"--web.listen-address={it.listen['alertmanager']}",
                         f"--web.config.file={at}/alertmanager.web.yml"],
        "prometheus": [str(part("prometheus").path), f"--config.file={at}/prometheus.yml",
            f"--storage.tsdb.path={at}/tsdb",
                       f"--web.listen-address={it.listen['prometheus']}", f"--web.config.file={at}/prometheus.web.yml",
                       "--rules.alert.resend-delay=500ms"],
        "gateway": [*ours, "gateway", "run", "--config", f"{at}/gateway.yaml"],
        "sidecar": [*ours, "sidecar", "run", "--config", f"{at}/sidecar.yaml"],
        "board": [*ours, "board", "--prometheus", it.urls["prometheus"], "--http-config", f"{at}/prometheus.http.yml",
                  "--listen", it.listen["board"], "--web-config", f"{at}/board.web.yml"],
    }  # fmt: skip


@pytest.fixture(scope="module")
def chain(tmp_path_factory, part, free_port) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder)
    server = engine(authority.pair("engine"))
    it = configured(folder, authority, free_port, f"https://127.0.0.1:{server.server_address[1]}")
    running = []
    try:
        for name, command in commands(it, part).items():
            log = (folder / f"{name}.log").open("w")
            env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": os.environ.get("HOME", "/")}
            running.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=env))
            it.pids[name] = running[-1].pid
        eventually(lambda: {"1"} == {value for _, value in up(it)} and 3 == len(up(it)), "every target up")
        eventually(lambda: [200] * len(OPEN) == [asked(it, *each)[0] for each in OPEN.items()], "every probe")
        yield it
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(60)
        server.shutdown()
        server.server_close()


def asked(
    it: SimpleNamespace,
    server: str,
    path: str,
    login: str | None = "",
    method: str = "GET",
    body: bytes | None = None,
    **headers: str,
) -> tuple[int, bytes]:
    """login: whose password; '' the server's own, None nobody's."""
    context = ssl.create_default_context(cafile=str(it.authority.ca))
    request = urllib.request.Request(it.urls[server] + path, body, dict(headers), method=method)
    if login is not None:
        word = base64.b64encode(f"watcher:{SECRETS[login or server]}".encode()).decode()
        request.add_header("Authorization", f"Basic {word}")
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def up(it: SimpleNamespace) -> list[tuple[str, str]]:
    _, body = asked(it, "prometheus", "/api/v1/query?query=up")
    return sorted((one["metric"]["job"], one["value"][1]) for one in json.loads(body)["data"]["result"])


def command(*words: str) -> Any:
    return CliRunner().invoke(cli.main, [str(word) for word in words])


def test_prometheus_scrapes_over_tls_with_a_login(chain):
    """Prometheus scrapes ours and the engine over TLS with a login."""
    all_up = [("vllm", "1"), ("vllm-gateway", "1"), ("vllm-watch-sidecar", "1")]
    eventually(lambda: all_up == up(chain), "all targets up")


def test_the_sidecar_reads_its_engine_over_tls_with_a_key(chain):
    _, page = asked(chain, "sidecar", "/metrics")
    assert b'vllm_watch_source_up{kind="engine",source="one"} 1' in page


def test_alert_reaches_alertmanager_with_its_page(chain):
    """An alert reaches Alertmanager and its page is found there."""
    way = ("--alertmanager", chain.urls["alertmanager"], "--http-config", chain.folder / "alertmanager.http.yml")
    eventually(lambda: "VLLMWatchdog" in command("runbook", "--firing", *way).output, what="the alert")


def test_commands_reach_a_prometheus_that_wants_tls_and_a_login(chain):
    way = ("--prometheus", chain.urls["prometheus"], "--http-config", chain.folder / "prometheus.http.yml")
    page = command("runbook", "VLLMWatchdog", "--live", *way)
    assert (0, True) == (page.exit_code, "does not answer" not in page.output), page.output
    looked = command("doctor", *way, "--window", "1m")
    assert looked.exit_code in (0, 1), looked.output
    assert "does not answer" not in looked.output
    engine = ("--http-config", chain.folder / "engine.http.yml")
    for words in (
        ("metrics", "check", chain.engine),
        ("metrics", "drift", chain.engine),
        ("alerts", "slo", "--page", chain.engine),
    ):
        checked = command(*words, *engine)
        assert 0 == checked.exit_code, checked.output
        assert "Error" in command(*words).output, "without the login it is told"


def test_the_board_shows_what_the_secured_prometheus_holds(chain):
    assert 200 == asked(chain, "board", "/runbooks/VLLMWatchdog")[0]
    status, body = asked(chain, "board", "/api/variables/vllm-watch-overview")
    if status == 404:  # the uid of the first board, as its page tells it
        _, body = asked(chain, "board", "/")
        uid = body.decode().partition("/d/")[2].partition('"')[0].partition("/")[0]
        status, body = asked(chain, "board", f"/api/variables/{uid}")
    assert 200 == status
    assert b"does not answer" not in body
    assert b"wants a login" not in body


def test_client_key_opens_the_gateway_over_tls(chain):
    """A client's key opens the gateway over TLS and a wrong one does not."""
    ask = json.dumps({"model": "tiny", "messages": []}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {chain.key}"}
    assert 200 == asked(chain, "gateway", "/v1/chat/completions", None, "POST", ask, **headers)[0]
    assert (
        401
        == asked(
            chain, "gateway", "/v1/chat/completions", None, "POST", ask, **headers | {"Authorization": "Bearer other"}
        )[0]
    )


@pytest.mark.parametrize("server", LOGINS)
def test_without_the_right_login_nothing_is_told(server, chain):
    path = {"prometheus": "/api/v1/query?query=up", "alertmanager": "/api/v2/alerts", "board": "/runbooks"}.get(
        server, "/metrics"
    )
    other = next(name for name in LOGINS if name != server)
    assert [401, 401, 200] == [asked(chain, server, path, login)[0] for login in (None, other, "")]


@pytest.mark.parametrize("server", SERVERS)
def test_plain_http_gets_no_answer_of_use(server, chain):
    with pytest.raises((urllib.error.URLError, ConnectionError)) as told:
        urllib.request.urlopen(f"http://{chain.listen[server]}/metrics", timeout=30)
    assert 400 == getattr(told.value, "code", 400), "Go's servers say so, ours hang up"


@pytest.mark.parametrize("server", OPEN)
def test_probes_need_no_login(server, chain):
    assert 200 == asked(chain, server, OPEN[server], None)[0]


def test_events_are_for_those_with_the_token_or_the_login(chain):
    token = {"Authorization": f"Bearer {SECRETS['events']}"}
    assert [401, 200, 200, 401] == [
        asked(chain, "sidecar", "/events", None)[0],
        asked(chain, "sidecar", "/events", None, **token)[0],
        asked(chain, "sidecar", "/events")[0],
        asked(chain, "sidecar", "/metrics", None, **token)[0],
    ]


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("local issuer certificate", {"tls_config": {}}),
        ("Hostname mismatch", {"tls_config": {"ca_file": "ca.pem", "server_name": "other"}}),
        ("credentials required: --http-config", {"tls_config": {"ca_file": "ca.pem"}}),
        ("basic_auth: a password", {"basic_auth": {"username": "me", "password": "s3cret"}}),
    ],
)
def test_what_is_wrong_between_us_and_prometheus_is_one_sentence(words, change, chain):
    path = written(chain.folder / "wrong.http.yml", change)
    told = command("doctor", "--prometheus", chain.urls["prometheus"], "--http-config", path)
    assert (2, True) == (told.exit_code, words in told.output), told.output
    assert "Traceback" not in told.output
    assert "s3cret" not in told.output
    assert 1 == len([line for line in told.output.splitlines() if line.startswith("Error")])


def test_http_where_https_is_spoken_is_told(chain):
    told = command("doctor", "--prometheus", f"http://{chain.listen['prometheus']}")
    assert "TLS: write https://" in told.output


@pytest.mark.parametrize("server", ["sidecar", "board", "figures", "gateway"])
def test_a_certificate_is_replaced_while_it_runs(server, chain):
    host, port = chain.listen[server].split(":")

    def shown() -> str:
        return ssl.get_server_certificate((host, int(port)), ca_certs=str(chain.authority.ca))

    before = shown()
    fresh = chain.authority.pair(server)  # written over the files that are in use
    assert (fresh.cert.read_text().strip(), True) == (shown().strip(), before.strip() != fresh.cert.read_text().strip())


def test_secrets_stand_in_no_log_no_page_and_no_process(chain):
    """After wrong logins, garbage and broken files, which are when programs talk."""
    for server in LOGINS:
        asked(chain, server, "/metrics", next(name for name in LOGINS if name != server))
    secrets = [*SECRETS.values(), chain.key]
    secrets += [base64.b64encode(f"watcher:{secret}".encode()).decode() for secret in SECRETS.values()]
    seen = {path.name: path.read_text(errors="replace") for path in chain.folder.glob("*.log")}
    seen |= {
        path.name: path.read_text()
        for path in (chain.folder / "requests.jsonl", chain.folder / "events.jsonl")
        if path.exists()
    }
    for name, pid in chain.pids.items():
        seen |= {
            f"{name} {what}": Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")
            for what in ("cmdline", "environ")
        }
    for server, path in (
        ("figures", "/metrics"),
        ("sidecar", "/metrics"),
        ("prometheus", "/api/v1/status/config"),
        ("prometheus", "/metrics"),
    ):
        seen[server + path] = asked(chain, server, path)[1].decode()
    assert len(seen) >= 5 + 2 * 5 + 4
    assert [] == [(place, secret) for place, text in seen.items() for secret in secrets if secret in text]
