"""How others are asked: the http_config file of Prometheus, with secrets in files of their own, read again when one of
them is another."""

from __future__ import annotations

import base64
import contextlib
import re
import ssl
import threading
import traceback
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from exporters.config import BadConfig
from exporters.net.http_client import HttpClientConfig, client_ssl_context, describe_error, request_options
from exporters.net.listener_auth import ListenerAuth
from exporters.net.prometheus import address_from
from exporters.requests.record import RequestRecord
from exporters.tracing import collector
from exporters.tracing.collector import Attempt
from exporters.tracing.config import OtlpConfig
from exporters.tracing.sdk_spans import SpanFactory
from exporters.tracing.spans import span_of
from exporters.tracing.transport import span_exporter
from stack import config as configuration
from stack.gateway.teams import load_policy
from stack.gateway.upstream_client import Unreachable, UpstreamClient
from tests.support.authority import Authority, Pair

TOKEN = "tok-55aa"


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def pair(authority) -> Pair:
    return authority.pair("named", "engine.test")  # not what its address says


class Answer(BaseHTTPRequestHandler):
    """Says what it was told in the one header."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        body = self.headers.get("Authorization", "none").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Nothing to say."""


@contextlib.contextmanager
def answering(pair: Pair) -> Iterator[str]:
    """Over TLS, with this certificate; the URL."""
    http = HTTPServer(("127.0.0.1", 0), Answer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    http.socket = context.wrap_socket(http.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"https://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()


@pytest.fixture
def server(pair) -> Iterator[str]:
    """Its certificate is for engine.test."""
    with answering(pair) as url:
        yield url


def config(folder: Path, text: str) -> Path:
    path = folder / "http.yml"
    path.write_text(text)
    return path


async def said(url: str, way: HttpClientConfig) -> str:
    async with aiohttp.ClientSession() as session, session.get(url, **way.current_options()) as got:
        return await got.text()


async def test_a_token_goes_to_whom_the_authority_vouches_for(tmp_path, authority, server):
    (tmp_path / "token").write_text(TOKEN + "\n")
    tls = f"tls_config: {{ca_file: {authority.ca}, server_name: engine.test}}"
    way = HttpClientConfig(config(tmp_path, f"authorization: {{credentials_file: token}}\n{tls}"))
    assert f"Bearer {TOKEN}" == await said(server, way)
    (tmp_path / "token").write_text("tok-next")
    assert "Bearer tok-next" == await said(server, way), "the file is read again when it is another"


def test_password_replaced_while_read_is_not_missed(tmp_path, monkeypatch):
    """A password that is replaced while it is read is not missed."""
    word, read = tmp_path / "word", Path.read_text
    word.write_text("former")
    path = config(tmp_path, "basic_auth: {username: me, password_file: word}")

    def slow(file: Path, *given: Any, **named: Any) -> str:
        text = read(file, *given, **named)
        if file == word and text == "former":
            word.write_text("newer")
        return text

    monkeypatch.setattr(Path, "read_text", slow)
    way = HttpClientConfig(path)
    assert (
        "me:newer"
        == base64.b64decode(way.current_options()["headers"]["Authorization"].removeprefix("Basic ")).decode()
    )


def test_files_resolve_from_the_configuration_file(tmp_path, monkeypatch):
    """Files that the sidecar's configuration names are found from where it stands."""
    path = tmp_path / "sidecar.yaml"
    path.write_text(
        "web_config: web.yml\nengines: [{name: one, url: 'https://e:8000', http_config: http.yml}]\n"
        "otlp: {endpoint: 'https://c:4318', ca_file: ca.pem, headers_file: /run/headers}\n"
    )
    it = configuration.sidecar(path)
    folder = str(tmp_path)
    assert (f"{folder}/web.yml", f"{folder}/http.yml", f"{folder}/ca.pem", "/run/headers") == (
        it.web_config, it.engines[0].http_config, it.otlp.ca_file, it.otlp.headers_file,
    )  # fmt: skip
    path.write_text("otlp: {endpoint: 'https://c:4318', headers_file: headers}\n")
    assert f"{folder}/headers" == configuration.sidecar(path).otlp.headers_file
    path.write_text(
        "requests_log: [log/requests.jsonl, /var/log/b.jsonl]\nstate: s.state\nevents: events.jsonl\nevents_token_file:"
        " token\n"
    )
    it = configuration.sidecar(path)
    assert (
        (f"{folder}/log/requests.jsonl", "/var/log/b.jsonl"),
        f"{folder}/s.state",
        f"{folder}/events.jsonl",
        f"{folder}/token",
    ) == (it.requests_log, it.state, it.events, it.events_token_file)
    monkeypatch.chdir(tmp_path)
    assert (
        it
        == configuration.sidecar(Path("sidecar.yaml"))
        == configuration.sidecar(Path("..") / tmp_path.name / "sidecar.yaml")
    )
    path.write_text("events: ''\n")
    assert configuration.sidecar(path).events == ""


async def test_a_name_that_the_certificate_does_not_have_is_told(tmp_path, authority, server):
    way = HttpClientConfig(config(tmp_path, f"tls_config: {{ca_file: {authority.ca}}}"))
    with pytest.raises(aiohttp.ClientConnectorCertificateError) as told:
        await said(server, way)
    assert re.search("IP address mismatch, .*'127.0.0.1'", describe_error(told.value))


async def test_nobody_at_an_address_is_told_in_the_words_of_the_system(free_port):
    with pytest.raises(aiohttp.ClientConnectorError) as told:
        async with aiohttp.ClientSession() as session:
            await session.get(f"http://127.0.0.1:{free_port()}/")
    assert "Connection refused" == describe_error(told.value)


def test_a_password_stands_behind_its_user(tmp_path):
    (tmp_path / "word").write_text("pass:wörd\n")
    asked = HttpClientConfig(config(tmp_path, "basic_auth: {username: me, password_file: word}")).current_options()
    assert "me:pass:wörd" == base64.b64decode(asked["headers"]["Authorization"].removeprefix("Basic ")).decode()


def test_who_has_no_such_file_asks_as_before():
    assert {} == request_options(None)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ("basic_auth: a password .* password_file", "basic_auth: {username: me, password: s3cret}"),
        ("authorization: credentials .* credentials_file", "authorization: {credentials: s3cret}"),
        ("password_file is missing", "basic_auth: {username: me}"),
        ("credentials_file is missing", "authorization: {type: Bearer}"),
        (
            "exclude each other",
            "basic_auth: {username: me, password_file: secret}\nauthorization: {credentials_file: secret}",
        ),
        ("tls_config.insecure_skip_verify is unknown", "tls_config: {insecure_skip_verify: true}"),
        ("tls_config: cert_file and key_file ", "tls_config: {cert_file: a}"),
        ("ca_file: {folder}/a .*: No such file", "tls_config: {ca_file: a}"),
        ("ca_file: {folder}/secret .* no PEM certificate", "tls_config: {ca_file: secret}"),
        ("password_file: {folder}/secret2 .*: No such file", "basic_auth: {username: me, password_file: secret2}"),
        ("password_file: {folder}/two .* one line", "basic_auth: {username: me, password_file: two}"),
        ("authorization: type .* Bearer; .*basic_auth", "authorization: {type: Basic, credentials_file: secret}"),
        ("bearer_token is unknown", "bearer_token: s3cret"),
    ],
)
def test_mistake_names_the_place_and_no_secret(values, text, tmp_path):
    """A mistake is one sentence that names the place and no secret."""
    (tmp_path / "secret").write_text("s3cret\n")
    (tmp_path / "two").write_text("s3cret\ns3cret\n")
    with pytest.raises(BadConfig) as told:
        HttpClientConfig(config(tmp_path, text))
    assert re.search(values.replace("{folder}", re.escape(str(tmp_path))), str(told.value))
    assert str(told.value).startswith(f"--http-config: {tmp_path}/http.yml")
    assert "s3cret" not in str(told.value)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("found undefined alias", "*hunter2"),
        ("could not determine a constructor for the tag", "!hunter2"),
        ("could not determine a constructor for the tag", "!!hunter2 x"),
        ("could not determine a constructor for the tag", "!hun'ter2"),
        ("found undefined tag handle", "!hunter2!x y"),
        ("not a valid int", "!!int hunter2"),
        ("not a valid float", "!!float hunter2"),
        ("not a valid bool", "!!bool hunter2"),
        ("not a valid timestamp", "!!timestamp hunter2"),
        ("not a valid float", "!!float ''"),
        ("failed to convert base64 data into ascii", "!!binary hunter2ü"),
        ("it cannot be read", "!<hunter2%ff> x"),
        ("found character '%' that cannot start any token", "%hunter2"),
        ("found character '\\t' that cannot start any token", "\thunter2"),
        ("expected ',' or ']', but got '<scalar>'", "['x' hunter2]"),
    ],
)
@pytest.mark.parametrize(
    ("read", "text"),
    [
        (HttpClientConfig, "basic_auth:\n  password: {}\n"),
        (ListenerAuth, "basic_auth_users:\n  watcher: {}\n"),
        (load_policy, "teams:\n  demo: {{keys: {}\n  }}\n"),
    ],
)
def test_a_secret_without_quotes_that_is_no_yaml_is_not_repeated(read, text, words, value, tmp_path):
    """Passwords begin with anything. Neither the sentence nor a traceback of it has more of it than one character; it
    says the line and the kind."""
    with pytest.raises(BadConfig) as told:
        read(config(tmp_path, text.format(value)))
    assert f"http.yml, line 2: invalid YAML: {words}" == str(told.value)[str(told.value).index("http.yml") :]
    for part in ("hunter2", "hun'ter2", "hun"):
        assert part not in "".join(traceback.format_exception(told.value))


def test_a_token_in_place_of_its_type_is_not_repeated(tmp_path):
    with pytest.raises(BadConfig, match=r"authorization: type .*Bearer") as told:
        HttpClientConfig(config(tmp_path, "authorization: {type: Bearer hunter2, credentials_file: a}\n"))
    assert "hunter2" not in str(told.value)


def test_a_key_that_stands_twice_is_named(tmp_path):
    with pytest.raises(BadConfig, match=r"line 1: .* it's me, .*line 1$"):
        ListenerAuth(config(tmp_path, "basic_auth_users: {it's me: a, it's me: b}"))


def test_one_way_to_log_in_is_enough(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    with pytest.raises(ValueError, match=r"--token-file, --user-file .* --http-config"):
        address_from("https://127.0.0.1:9", tmp_path / "token", None, config(tmp_path, ""))


async def test_the_gateway_asks_an_engine_whose_authority_it_was_told(authority, tmp_path, server):
    """Its own client; the engine's name has to fit too."""
    other = Authority(tmp_path / "other")
    for ca, words in ((authority.ca, "IP address mismatch"), (other.ca, "local issuer certificate")):
        client = UpstreamClient(2.0, tls=client_ssl_context(ca, "upstream_ca_file"))
        with pytest.raises(Unreachable, match=words):
            await client.send(server, "GET", "/", [], b"")
        client.close()


def send_span(endpoint: str, protocol: str = "http", ca_file: Path | None = None) -> Attempt:
    """The outcome of one export call."""
    attempts: list[Attempt] = []
    config = OtlpConfig(endpoint=endpoint, protocol=protocol, ca_file=str(ca_file) if ca_file else None)
    exporter = span_exporter(config, "0", attempts.append)
    span = span_of(
        RequestRecord(request_id="r", trace_id="a" * 32, span_id="b" * 16, ts="2026-05-12T09:30:01Z", e2e_ms=1.0)
    )
    exporter.export([SpanFactory("s", "0").make(span)])
    exporter.shutdown()
    return attempts[-1]


def test_spans_go_to_a_collector_whose_authority_is_named(authority, tmp_path, server, monkeypatch):
    monkeypatch.setattr(collector, "EXPORT_TIMEOUT_S", 0.5)
    wrong_name, unknown = send_span(server, ca_file=authority.ca), send_span(server)
    assert ("unavailable", "unavailable") == (wrong_name.reason, unknown.reason)
    assert "IP address mismatch" in wrong_name.detail
    assert "local issuer certificate" in unknown.detail
    with pytest.raises(BadConfig, match=r"otlp: ca_file: .*cannot be used"):
        send_span(server, ca_file=tmp_path / "none")
    with pytest.raises(ValueError, match=r"ca_file .* https://"):
        OtlpConfig(endpoint="http://127.0.0.1:4318", ca_file="x")


def test_a_collector_with_the_right_name_gets_spans_over_http(authority):
    with answering(authority.pair("collector")) as url:
        assert Attempt() == send_span(url, ca_file=authority.ca)


def test_an_authority_that_the_system_trusts_needs_no_ca_file(authority, monkeypatch):
    """The HTTP library would ask the authorities that it brings, which know none of an organization's."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    with answering(authority.pair("collector")) as url:
        assert Attempt() == send_span(url)


def test_a_collector_with_the_right_name_gets_spans_over_grpc(authority, tmp_path, monkeypatch):
    pair, got = authority.pair("collector"), list[bytes]()

    def export(body: bytes, _: grpc.ServicerContext) -> bytes:
        got.append(body)
        return b""

    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server = grpc.server(
        futures.ThreadPoolExecutor(1), handlers=[grpc.method_handlers_generic_handler(service, handlers)]
    )
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.cert.read_bytes())])
    )
    server.start()
    try:
        endpoint = f"https://127.0.0.1:{port}"
        assert Attempt() == send_span(endpoint, "grpc", authority.ca)
        assert 1 == len(got)
        with monkeypatch.context() as patched:
            patched.setattr(collector, "EXPORT_TIMEOUT_S", 3.0)  # it is tried again until then
            refused = send_span(endpoint, "grpc", Authority(tmp_path).ca)
        assert "unavailable" == refused.reason
        assert "UNAVAILABLE" in refused.detail
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        assert Attempt() == send_span(endpoint, "grpc")
    finally:
        server.stop(None)
    assert 2 == len(got)
