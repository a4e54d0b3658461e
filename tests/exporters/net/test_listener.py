"""Every listener of ours: what web.yml says is what is asked of clients, and whoever is slow, large or many does not
keep others out."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import logging
import re
import resource
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import bcrypt
import pytest
import uvloop
from aiohttp import web
from cryptography.hazmat.primitives import serialization

from exporters.config import BadConfig
from exporters.net import listener, listener_auth
from exporters.net.addresses import split_address
from exporters.net.http_client import HttpClientConfig
from exporters.net.listener import AUTHENTICATED, listen
from exporters.net.listener_auth import ListenerAuth
from tests.support.authority import Authority, Pair
from tests.support.wait import until

PASSWORD, TOKEN = "pass-3f7c:öl", "tok-91be"
HASH = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()


def login(user: str, password: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}}


LOGIN = login("prometheus", PASSWORD)


pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy")


@pytest.fixture
def event_loop_policy():
    """What the gateway, the sidecar and the board run on."""
    return uvloop.EventLoopPolicy()


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def pair(authority) -> Pair:
    return authority.pair("server")


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    if request.path == "/read":
        await request.read()
    return web.Response(text=f"here, {request.get(AUTHENTICATED, False)}\n")


@contextlib.asynccontextmanager
async def serving(
    protection: ListenerAuth | None = None,
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]] = answer,
    hang_ups: bool = False,
    **settings: object,
) -> AsyncIterator[listener.Listening]:
    """hang_ups: who goes away ends what was done for it, as at the board."""
    runner = web.ServerRunner(web.Server(handler, handler_cancellation=hang_ups, access_log=None), shutdown_timeout=0.2)
    listening = await listen(runner, "listen", "127.0.0.1:0", protection, **settings)
    try:
        yield listening
    finally:
        await listening.close()
        await runner.cleanup()


def secured(
    folder: Path, pair: Pair | None = None, *, users: bool = False, tokens: bool = False, more: str = ""
) -> Path:
    """A web.yml in this folder."""
    text = f"tls_server_config:\n  cert_file: {pair.cert}\n  key_file: {pair.key}\n{more}" if pair else ""
    if users:
        text += f"basic_auth_users:\n  prometheus: {HASH}\n"
    if tokens:
        (folder / "token").write_text(TOKEN + "\n")
        text += "bearer_token_files: [token]\n"
    path = folder / "web.yml"
    path.write_text(text)
    return path


def trusting(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca))
    if pair:
        context.load_cert_chain(pair.cert, pair.key)
    return context


def asked(path: Path) -> dict[str, object]:
    """What a file of ours for clients makes of a request, as `status` takes it."""
    given = HttpClientConfig(path).current_options()
    return {"tls": given["ssl"], "headers": given["headers"]}


async def status(url: str, *, tls: ssl.SSLContext | bool = True, local: str = "127.0.0.1", **asked: object) -> int:
    """local: the address from which it is asked."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=(local, 0))) as session,
        session.get(url, ssl=tls, **asked) as got,
    ):
        await got.read()
        return got.status


async def test_a_listener_without_a_file_answers_everyone():
    async with serving() as it:
        assert it.url.startswith("http://127.0.0.1:")
        assert 200 == await status(it.url)


def test_it_is_the_same_without_uvloop(tmp_path, authority, pair, brief):
    async def run() -> None:
        async with serving(ListenerAuth(secured(tmp_path, pair, users=True))) as it:
            assert [200, 401] == [await status(it.url, tls=trusting(authority), **asked) for asked in (LOGIN, {})]
            brief()
            reader, writer = await connected(it.url)
            await ends(reader)
            writer.close()
            assert 1 == it.rejected["handshake"]

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(run())


async def test_a_connection_accepted_at_the_end_is_closed():
    """The listener closes in the very turn of the loop that accepted it."""
    runner = web.ServerRunner(web.Server(lambda _: web.Response()))
    listening = await listen(runner, "listen", "127.0.0.1:0")
    host, port = listening.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        listening._accept(listening._sockets[0])
        await listening.close()
        client.setblocking(False)
        assert b"" == await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 30)
    await runner.cleanup()


async def test_tls_answers_only_clients_that_trust_the_authority(tmp_path, authority, pair):
    """Only those who trust the authority get an answer over TLS."""
    async with serving(ListenerAuth(secured(tmp_path, pair))) as it:
        assert it.url.startswith("https://")
        assert 200 == await status(it.url, tls=trusting(authority))
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status(it.url)
        with pytest.raises(aiohttp.ClientError):
            await status(it.url.replace("https", "http"))


@pytest.mark.parametrize(
    ("want", "asked"),
    [
        (200, LOGIN),
        (200, {"headers": {"Authorization": f"Bearer {TOKEN}"}}),
        (200, {"headers": {"Authorization": f"bearer {TOKEN}"}}),
        (401, {}),
        (401, login("prometheus", "wrong")),
        (401, login("nobody", PASSWORD)),
        (401, login("prometheus", "x" * 73)),
        (401, {"headers": {"Authorization": "Bearer"}}),
        (401, {"headers": {"Authorization": f"Bearer {TOKEN}x"}}),
        (401, {"headers": {"Authorization": "Basic !!!"}}),
        (401, {"headers": {"Authorization": f"Basic {TOKEN}"}}),
        (401, {"headers": {"Authorization": "Digest x"}}),
    ],
)
async def test_a_login_is_a_users_password_or_a_token(want, asked, tmp_path):
    async with serving(ListenerAuth(secured(tmp_path, users=True, tokens=True))) as it:
        assert want == await status(it.url, **asked)


async def test_who_is_refused_is_told_which_logins_there_are(tmp_path):
    async with (
        serving(ListenerAuth(secured(tmp_path, users=True, tokens=True))) as it,
        aiohttp.ClientSession() as session,
        session.get(it.url) as got,
    ):
        assert ['Basic realm="vllm-watch"', 'Bearer realm="vllm-watch"'] == got.headers.getall("WWW-Authenticate")


async def test_probes_need_no_login_and_nothing_near_them_is_open(tmp_path):
    async with serving(ListenerAuth(secured(tmp_path, users=True)), open_paths=("/-/healthy",)) as it:
        assert [200, 401, 401] == [await status(it.url + path) for path in ("/-/healthy", "/-/healthy/", "/-/healthyx")]


async def test_path_with_own_login_learns_if_client_is_known(tmp_path):
    """A path with a login of its own is told whether the listener knows the client."""
    async with (
        serving(ListenerAuth(secured(tmp_path, users=True)), own_login=lambda path: path == "/events") as it,
        aiohttp.ClientSession() as session,
    ):
        for want, asked in (("here, False\n", {}), ("here, True\n", LOGIN)):
            async with session.get(it.url + "/events", **asked) as got:
                assert want == await got.text()


async def test_tls_alone_lets_nobody_in_where_a_token_is_wanted(tmp_path, authority, pair):
    """A listener without logins must not tell the events that it knows who asks."""
    protection = ListenerAuth(secured(tmp_path, pair))
    async with (
        serving(protection, own_login=lambda _: True) as it,
        aiohttp.ClientSession() as session,
        session.get(it.url, **LOGIN, ssl=trusting(authority)) as got,
    ):
        assert "here, False\n" == await got.text()


async def test_a_certificate_of_the_client_is_asked_for_and_checked(tmp_path, authority, pair):
    stranger = Authority(tmp_path / "other")
    more = f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {authority.ca}\n"
    async with serving(ListenerAuth(secured(tmp_path, pair, more=more))) as it:
        assert 200 == await status(it.url, tls=trusting(authority, authority.pair("client")))
        for wrong in (None, stranger.pair("client")):
            with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
                await status(it.url, tls=trusting(authority, wrong))


async def test_tls_1_2_is_refused_where_1_3_is_the_least(tmp_path, authority, pair):
    older = trusting(authority)
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(ListenerAuth(secured(tmp_path, pair))) as it:
        assert 200 == await status(it.url, tls=older)
    async with serving(ListenerAuth(secured(tmp_path, pair, more="  min_version: TLS13\n"))) as it:
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            await status(it.url, tls=older)


async def test_new_certificate_holds_from_next_connection(tmp_path, caplog):
    """A new certificate holds from the next connection on and a broken one changes nothing."""
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    pair = first.pair("server")
    async with serving(ListenerAuth(secured(tmp_path, pair))) as it:
        assert 200 == await status(it.url, tls=trusting(first))
        fresh = second.pair("server")
        pair.cert.write_bytes(fresh.cert.read_bytes())  # the key is still the old one
        for _ in range(3):
            assert 200 == await status(it.url, tls=trusting(first))
        assert 1 == len(re.findall("does not match .*previous settings", caplog.text))
        pair.key.write_bytes(fresh.key.read_bytes())
        assert 200 == await status(it.url, tls=trusting(second))
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status(it.url, tls=trusting(first))


async def test_who_is_connected_stays_when_the_certificate_is_replaced(tmp_path):
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    pair = first.pair("server")
    async with serving(ListenerAuth(secured(tmp_path, pair))) as it, aiohttp.ClientSession() as session:
        async with session.get(it.url, ssl=(tls := trusting(first))) as got:
            await got.read()
        fresh = second.pair("server")
        pair.cert.write_bytes(fresh.cert.read_bytes())
        pair.key.write_bytes(fresh.key.read_bytes())
        assert 200 == await status(it.url, tls=trusting(second))
        async with session.get(it.url, ssl=tls) as got:  # the connection is kept; a new one would be refused
            assert 200 == got.status


async def test_revoked_token_is_refused_and_new_one_accepted(tmp_path):
    """A token that is taken back lets nobody in and a new one holds at once."""
    asked = {"headers": {"Authorization": f"Bearer {TOKEN}"}}
    async with serving(ListenerAuth(secured(tmp_path, tokens=True))) as it:
        assert 200 == await status(it.url, **asked)
        (tmp_path / "token").write_text("another-one\n")
        assert 401 == await status(it.url, **asked)
        (tmp_path / "token").write_text(TOKEN)
        assert 200 == await status(it.url, **asked)
        (tmp_path / "token").unlink()
        assert 401 == await status(it.url, **asked)
        assert 401 == await status(it.url, headers={"Authorization": "Bearer "})


async def test_changed_password_is_refused(tmp_path):
    """A password that was changed is refused although it was known."""
    path = secured(tmp_path, users=True)
    async with serving(ListenerAuth(path)) as it:
        assert 200 == await status(it.url, **LOGIN)
        path.write_text(path.read_text().replace(HASH, bcrypt.hashpw(b"new", bcrypt.gensalt(4)).decode()))
        assert 401 == await status(it.url, **LOGIN)
        assert 200 == await status(it.url, **login("prometheus", "new"))


async def test_the_file_with_a_mistake_leaves_what_was_in_force(tmp_path, caplog):
    path = secured(tmp_path, users=True)
    async with serving(ListenerAuth(path)) as it:
        for text in ("basic_auth_user: {}", "basic_auth_users: {prometheus: secret-word}"):
            path.write_text(text)
            assert [200, 401] == [await status(it.url, **LOGIN), await status(it.url)]
        path.unlink()
        assert 401 == await status(it.url)
    assert 3 == caplog.text.count("previous settings")
    assert "secret-word" not in caplog.text


@pytest.mark.parametrize(
    "left", ["", "# logins\n", "---\n", "{}", "null\n", "basic_auth_users: {}\n", "bearer_token_files: []\n"]
)
async def test_a_file_that_was_emptied_switches_no_login_off(left, tmp_path, caplog):
    """As on a full disk, or in the midst of a copy: what is left is good YAML, and asks for nothing."""
    path = secured(tmp_path, users=True)
    text = path.read_text()
    async with serving(ListenerAuth(path)) as it:
        path.write_text(left)
        for _ in range(2):
            assert [200, 401] == [await status(it.url, **asked) for asked in (LOGIN, {})]
        assert 1 == caplog.text.count("users and tokens")
        path.write_text(text.replace(HASH, bcrypt.hashpw(b"new", bcrypt.gensalt(4)).decode()))
        assert [401, 200] == [await status(it.url, **asked) for asked in (LOGIN, login("prometheus", "new"))]


@pytest.mark.parametrize(("users", "warnings"), [(False, 1), (True, 0)])
def test_a_start_with_a_file_that_protects_nothing_says_so(users, warnings, tmp_path, caplog):
    path = secured(tmp_path, users=users)
    ListenerAuth(path, "web_config")
    assert warnings == len(caplog.messages) == caplog.text.count(f"web_config: {path} sets neither")


async def test_file_cut_behind_tls_keeps_logins_required(tmp_path, authority, pair):
    """A file that was cut off behind its TLS switches no login off."""
    path = secured(tmp_path, pair, users=True, tokens=True)
    text = path.read_text()
    async with serving(ListenerAuth(path)) as it:
        for end in ("bearer", "basic", "tls"):  # fewer logins, none, an empty file
            path.write_text(text.partition(end)[0])
            assert [200, 401] == [await status(it.url, tls=trusting(authority), **asked) for asked in (LOGIN, {})]


async def test_cut_file_still_asks_for_client_certificates(tmp_path, authority, pair, caplog):
    """A file that was cut off asks for certificates of clients as before."""
    path = secured(
        tmp_path, pair, more=f"  client_ca_file: {authority.ca}\n  client_auth_type: RequireAndVerifyClientCert\n"
    )
    async with serving(ListenerAuth(path)) as it:
        path.write_text(path.read_text().partition("  client_ca_file")[0])
        assert 200 == await status(it.url, tls=trusting(authority, authority.pair("client")))
        with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
            await status(it.url, tls=trusting(authority))
    assert 1 == caplog.text.count("client certificates")


async def test_logins_that_are_asked_for_from_now_on_need_no_new_start(tmp_path, authority, pair):
    path = secured(tmp_path, pair)
    async with serving(ListenerAuth(path)) as it:
        assert 200 == await status(it.url, tls=trusting(authority))
        secured(tmp_path, pair, users=True)
        assert [200, 401] == [await status(it.url, tls=trusting(authority), **asked) for asked in (LOGIN, {})]


async def test_bcrypt_runs_once_for_right_and_always_for_wrong(tmp_path, monkeypatch):
    """Bcrypt is asked once for a login that is right and each time for a wrong one."""
    asked: list[str] = []
    matches = listener_auth._matches
    monkeypatch.setattr(
        listener_auth, "_matches", lambda password, hashed: asked.append(hashed) or matches(password, hashed)
    )
    async with serving(ListenerAuth(secured(tmp_path, users=True))) as it:
        for _ in range(5):
            assert 200 == await status(it.url, **LOGIN)
        assert [HASH] == asked
        for user in ("prometheus", "nobody"):
            for _ in range(2):
                assert 401 == await status(it.url, **login(user, "wrong"))
    assert 5 == len(asked)
    assert 1 == len({one[:7] for one in asked}), "who does not exist costs as much as who does"


async def test_flood_of_wrong_logins_blocks_no_known_client(tmp_path, monkeypatch):
    """One address has eight of the 32 places, so that a Prometheus whose login is not known yet gets one too."""
    protection = ListenerAuth(secured(tmp_path, users=True))
    gate, matches = asyncio.Event(), listener_auth._matches

    async def slow(*given: object) -> bool:
        await gate.wait()
        return matches(*given)

    async with serving(protection) as it:
        assert 200 == await status(it.url, **LOGIN)
        monkeypatch.setattr(listener_auth, "_matches_apart", slow)
        wrong = [asyncio.create_task(status(it.url, **login("prometheus", f"w{number}"))) for number in range(40)]
        assert 503 == await next(asyncio.as_completed(wrong))
        assert 200 == await status(it.url, **LOGIN)
        protection._known.clear()
        other = asyncio.create_task(status(it.url, local="127.0.0.2", **LOGIN))
        await until(lambda: protection._waiting["127.0.0.2"])
        assert 503 == await status(it.url, **LOGIN), "its own address has no place left"
        gate.set()
        assert 200 == await other
        codes = await asyncio.gather(*wrong)
        assert {401: listener_auth.LOGINS_OF_ONE, 503: 40 - listener_auth.LOGINS_OF_ONE} == {
            each: codes.count(each) for each in set(codes)
        }
    assert not protection._waiting, "addresses are forgotten"


async def test_waiting_logins_are_bounded(tmp_path, monkeypatch):
    """No more logins wait than there are places from however many addresses."""
    protection, gate = ListenerAuth(secured(tmp_path, users=True)), asyncio.Event()

    async def slow(*_: object) -> bool:
        await gate.wait()
        return False

    monkeypatch.setattr(listener_auth, "_matches_apart", slow)
    header = login("prometheus", "wrong")["headers"]["Authorization"]
    waiting = [
        asyncio.create_task(protection.authenticate(header, f"192.0.2.{number}"))
        for number in range(listener_auth.LOGINS_WAITING)
    ]
    await asyncio.sleep(0)
    with pytest.raises(listener_auth.TooMany):
        await protection.authenticate(header, "192.0.2.99")
    gate.set()
    assert not any(await asyncio.gather(*waiting))


class Slow:
    """bcrypt that is done when `gate` is set; how many were asked, how many at once, and in which threads."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked = self.now = self.most = 0
        self.threads = set[threading.Thread]()
        self._matches = listener_auth._matches

    def __call__(self, *given: object) -> bool:
        self.asked, self.now = self.asked + 1, self.now + 1
        self.most = max(self.most, self.now)
        self.threads.add(threading.current_thread())
        self.gate.wait(60)
        self.now -= 1
        return self._matches(*given)


@pytest.fixture
def slow(monkeypatch):
    it = Slow()
    monkeypatch.setattr(listener_auth, "_matches", it)
    yield it
    it.gate.set()


async def test_disconnect_keeps_turn_until_its_hash_is_done(tmp_path, slow):
    """A thread that hashes cannot be stopped; at the board, where a client disconnect ends the handler, as many of them
    ran as the loop has threads."""
    protection = ListenerAuth(secured(tmp_path, users=True))
    async with serving(protection, hang_ups=True) as it:
        for number in range(listener_auth.LOGINS_OF_ONE):
            _, writer = await connected(it.url)
            wrong = login("prometheus", f"w{number}")["headers"]["Authorization"]
            writer.write(f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: {wrong}\r\n\r\n".encode())
            await until(lambda taken=number + 1: slow.now and protection._waiting["127.0.0.1"] == taken)
            writer.close()
            await until(lambda: not it._open)
        assert 503 == await status(it.url, **LOGIN)
        drawing = asyncio.get_running_loop().run_in_executor(None, threading.current_thread)
        assert not slow.threads & {await drawing}, "those that draw panels are left alone"
        slow.gate.set()
        await until(lambda: not protection._waiting)
        assert 200 == await status(it.url, **LOGIN)
    assert (1, listener_auth.LOGINS_OF_ONE + 1) == (slow.most, slow.asked)
    assert not protection._checks
    for thread in slow.threads:
        thread.join(5)
        assert not thread.is_alive()


async def test_right_login_of_a_gone_client_is_remembered(tmp_path, slow):
    """A right login whose client went away is known when it comes again."""
    protection, header = ListenerAuth(secured(tmp_path, users=True)), LOGIN["headers"]["Authorization"]
    first = asyncio.create_task(protection.authenticate(header))
    await until(lambda: slow.now)
    first.cancel()
    slow.gate.set()
    assert await protection.authenticate(header)
    assert 1 == slow.asked


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.SelectorEventLoop])
def test_a_hash_at_the_end_keeps_nobody_and_leaves_nothing(loop, tmp_path, slow, caplog):
    """Neither a thread, nor a task about which the loop complains; those that wait for their turn never begin."""
    protection, header = (
        ListenerAuth(secured(tmp_path, users=True)),
        login("prometheus", "wrong")["headers"]["Authorization"],
    )

    async def run() -> None:
        asked = [asyncio.create_task(protection.authenticate(header, str(number))) for number in range(3)]
        await until(lambda: slow.now)
        for each in asked:
            each.cancel()
        assert 3 == protection._waiting.total()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())
    slow.gate.set()
    for thread in slow.threads:
        thread.join(5)
        assert not thread.is_alive()
    gc.collect()
    assert ([], 1, 0) == (caplog.records, slow.asked, protection._waiting.total())
    assert not protection._checks


def test_what_is_written_while_the_file_is_read_is_not_missed(tmp_path, monkeypatch):
    path, load = secured(tmp_path, users=True), listener_auth.config.load

    def slow(*given: object) -> object:
        monkeypatch.setattr(listener_auth.config, "load", load)
        try:
            return load(*given)
        finally:
            path.write_text("bearer_token_files: [token]\n")

    monkeypatch.setattr(listener_auth.config, "load", slow)
    protection = ListenerAuth(path)
    assert protection.logins
    assert ['Bearer realm="vllm-watch"'] == protection.challenges()


def test_key_written_while_certificate_is_read_is_used(tmp_path, monkeypatch, authority):
    """A key that comes while its certificate is read is not missed."""
    pair, fresh = authority.pair("turning"), authority.pair("turned")
    protection = ListenerAuth(secured(tmp_path, pair))
    context, made = protection.context(), listener_auth._context

    def slow(*given: object) -> ssl.SSLContext:
        monkeypatch.setattr(listener_auth, "_context", made)
        try:
            return made(*given)
        finally:
            pair.key.write_bytes(fresh.key.read_bytes())

    monkeypatch.setattr(listener_auth, "_context", slow)
    pair.cert.write_bytes(fresh.cert.read_bytes())
    assert context is protection.context(), "the key does not fit yet"
    assert context is not protection.context()


def test_file_named_before_it_exists_is_used_later(tmp_path, authority, caplog):
    """A file that is named before it is there is used when it comes."""
    pair, fresh = authority.pair("early"), authority.pair("late")
    path = secured(tmp_path, pair)
    protection = ListenerAuth(path)
    context = protection.context()
    late = tmp_path / "late.pem"
    path.write_text(f"tls_server_config: {{cert_file: late.pem, key_file: {fresh.key}}}\n")
    assert context is protection.context()
    assert "late.pem cannot be read" in caplog.text
    late.write_bytes(fresh.cert.read_bytes())
    assert context is not protection.context()


async def test_a_certificate_is_renewed_while_the_file_has_a_mistake(tmp_path, caplog):
    """Who renews certificates, and who edits the file, are often two; the mistake may stand there until the former
    certificate has expired."""
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    pair, fresh = first.pair("server"), second.pair("server")
    path = secured(tmp_path, pair)
    text = path.read_text()
    async with serving(ListenerAuth(path)) as it:
        path.write_text(text + "oops: 1\n")
        assert 200 == await status(it.url, tls=trusting(first))
        pair.cert.write_bytes(fresh.cert.read_bytes())  # the key is still the old one
        assert 200 == await status(it.url, tls=trusting(first))
        pair.key.write_bytes(fresh.key.read_bytes())
        assert 200 == await status(it.url, tls=trusting(second))
        path.write_text(text)
        assert 200 == await status(it.url, tls=trusting(second))
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [(True, False), (True, True), (True, False)] == [
        ("oops is unknown" in error, "does not match" in error) for error in errors
    ]


@pytest.mark.parametrize("more", ["", "basic_auth_users: {}\n"])
def test_certificate_renews_with_broken_file(more, tmp_path, authority):
    """A certificate is renewed while the file names one that is not there or lost its logins."""
    pair, fresh = authority.pair("former"), authority.pair("renewed")
    path = secured(tmp_path, pair, users=True)
    protection = ListenerAuth(path)
    context = protection.context()
    path.write_text(more or path.read_text().replace(str(pair.cert), "late.pem"))
    assert context is protection.context()
    pair.cert.write_bytes(fresh.cert.read_bytes())
    assert context is protection.context()
    pair.key.write_bytes(fresh.key.read_bytes())
    taken = protection.context()
    assert context is not taken
    assert taken is protection.context(), "once"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (r"tls_server_confg .*tls_server_config\?", "tls_server_confg: {}"),
        ("tls_server_config.key_file is missing", "tls_server_config: {cert_file: a}"),
        ("tls_server_config.cert_file: {folder}/a .*: No such file", "tls_server_config: {cert_file: a, key_file: b}"),
        ("no PEM file", "tls_server_config: {cert_file: web.yml, key_file: web.yml}"),
        ("key is encrypted", "tls_server_config: {cert_file: {cert}, key_file: locked.key}"),
        (r"min_version: .*'TLS10'.* TLS13\?", "tls_server_config: {cert_file: a, key_file: b, min_version: TLS10}"),
        ("client_ca_file has no effect", "tls_server_config: {cert_file: a, key_file: b, client_ca_file: c}"),
        (
            "needs client_ca_file",
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAndVerifyClientCert}",
        ),
        (
            "client_auth_type: .*'RequireAnyClientCert'",
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAnyClientCert}",
        ),
        ("basic_auth_users.me .*bcrypt hash; `htpasswd -nBC 10 me`", "basic_auth_users: {me: s3cret}"),
        ("basic_auth_users: a user name ", "basic_auth_users: {'a:b': s3cret}"),
        ("invalid YAML", "basic_auth_users: {me: [s3cret"),
        ("nested too deeply", "basic_auth_users: " + 1000 * "["),
        ("tls_server_config.cert_file: {folder}/a", 'tls_server_config: {cert_file: "a\\0b", key_file: web.yml}'),
    ],
)
def test_config_mistake_names_the_place(values, text, tmp_path, pair):
    """A mistake in the file is one sentence that names the place."""
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"x")
    (tmp_path / "locked.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )
    path = tmp_path / "web.yml"
    path.write_text(text.replace("{cert}", str(pair.cert)))
    with pytest.raises(BadConfig) as told:
        ListenerAuth(path)
    assert re.search(values.replace("{folder}", re.escape(str(tmp_path))), str(told.value))
    assert str(path) in str(told.value)
    assert "s3cret" not in str(told.value)


def test_logins_have_no_place_where_clients_bring_keys(tmp_path):
    with pytest.raises(BadConfig, match="basic_auth_users and bearer_token_files "):
        ListenerAuth(secured(tmp_path, users=True), tls_only=True)


# ---- slow, large, many


@pytest.fixture
def brief(monkeypatch) -> Callable[[], None]:
    """A function that gives the heads and handshakes of later connections little time."""

    def shorten() -> None:
        for name in ("HEAD_S", "HANDSHAKE_S"):
            monkeypatch.setattr(listener, name, 0.1)

    return shorten


async def outlast_a_head(it: listener.Listening) -> None:
    """Return once a connection that began just now was cut because its head did not come."""
    cut = it.rejected["slow_head"]
    reader, writer = await connected(it.url)
    await ends(reader)
    writer.close()
    assert it.rejected["slow_head"] == cut + 1


async def ends(reader: asyncio.StreamReader) -> None:
    """Return once the other side has ended the connection."""
    with contextlib.suppress(ConnectionError):
        while await asyncio.wait_for(reader.read(4096), 60):
            pass


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*split_address(url.partition("://")[2]))


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n", b"GET / HTTP/1.1\r\nHo"])
async def test_a_head_that_does_not_come_to_its_end_is_cut(first, brief):
    brief()
    async with serving() as it:
        reader, writer = await connected(it.url)
        writer.write(first)
        ending = asyncio.create_task(ends(reader))
        while not ending.done():  # a byte now and then does not help
            writer.write(b"a" if first else b"")
            await asyncio.wait([ending], timeout=0.02)
        await ending
        assert 1 == it.rejected["slow_head"]
        writer.close()


async def test_unfinished_second_head_is_cut(brief):
    """A second head that does not come to its end is cut and an idle connection is not."""
    async with serving() as it:
        reader, writer = await connected(it.url)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"\n\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readline()
            brief()
            await outlast_a_head(it)
        writer.write(b"GET / HTTP/1.1\r\n")
        await ends(reader)
        assert 3 == it.rejected["slow_head"]
        writer.close()


async def test_a_body_may_take_longer_than_a_head(brief):
    async with serving() as it:
        reader, writer = await connected(it.url)
        writer.write(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
        await until(lambda: [one for one in it._open if one._request_count])  # type: ignore[attr-defined]
        brief()
        for _ in range(4):
            await outlast_a_head(it)
            writer.write(b"a")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_handshake_that_does_not_come_to_its_end_is_cut(tmp_path, pair, brief):
    async with serving(ListenerAuth(secured(tmp_path, pair))) as it:
        brief()
        reader, writer = await connected(it.url)
        await ends(reader)
        writer.close()
        await until(lambda: not it._open)
        assert 1 == it.rejected["handshake"]


@pytest.mark.parametrize(
    ("want", "sent"),
    [
        (b" 400", b"\x16\x03\x01 garbage SECRET\r\n\r\n"),
        (b" 400", b"GET / HTTP/1.1\r\nno-colon-SECRET\r\n\r\n"),
        (b" 431", b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n"),
        (b" 431", b"GET / HTTP/1.1\r\nX: " + b"SECRET" * 2000 + b"\r\n\r\n"),
        (b" 400", b"POST /read HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloSECRET\r\n"),
        (b" 200", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 6\r\n\r\nSECRET"),
        (b" 500", b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 6\r\n\r\nSECRET"),
        (b" 431", b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: SECRET\r\n" % number for number in range(200)) + b"\r\n"),
    ],
)
async def test_unsound_request_is_refused_without_log_line(want, sent, caplog):
    """What is no sound request is refused and leaves no line in the log."""
    caplog.set_level(logging.DEBUG)
    async with serving() as it:
        reader, writer = await connected(it.url)
        writer.write(sent)
        assert want == (await reader.readline())[8:12]
        writer.close()
        assert 200 == await status(it.url)
    assert "SECRET" not in caplog.text
    assert "Traceback" not in caplog.text


async def test_beyond_the_bound_idle_connections_close_first(caplog):
    """Whoever holds connections open without asking does not keep a scrape out."""
    gate = asyncio.Event()

    async def slow(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/slow":
            await gate.wait()
        return web.Response(text="here\n")

    async with serving(handler=slow, most=3) as it:
        held = [await connected(it.url) for _ in range(3)]
        for reader, writer in held:
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"here\n")
        assert 200 == await status(it.url)
        await ends(held[0][0])
        busy = [asyncio.create_task(status(it.url + "/slow")) for _ in range(3)]
        await until(
            lambda: len(it._open) == 3 and all(one._current_request and not one.idle for one in it._open)  # type: ignore[attr-defined]
        )
        with pytest.raises(aiohttp.ClientError):
            await status(it.url)
        gate.set()
        assert [200, 200, 200] == await asyncio.gather(*busy)
        assert 1 == caplog.text.count("3 connections are open")
        assert 1 == it.rejected["full"]
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.SelectorEventLoop])
@pytest.mark.parametrize("tls", [False, True])
def test_those_who_say_nothing_keep_nobody_out(loop, tls, tmp_path, authority, pair):
    """Neither without a head nor in a handshake; the oldest of them give way long before their time is over."""

    async def run() -> None:
        async with serving(ListenerAuth(secured(tmp_path, pair) if tls else None), most=3) as it:
            silent = [await connected(it.url) for _ in range(3)]
            await until(lambda: len(it._open) == 3)
            assert 200 == await status(it.url, tls=trusting(authority))
            await ends(silent[0][0])
            assert (1, 0, 0) == tuple(it.rejected[reason] for reason in ("gave_way", "slow_head", "handshake"))
            assert 3 >= len(it._open)
            for _, writer in silent:
                writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


async def test_flood_looks_for_room_seldom(monkeypatch):
    """With 10,000 connections a look takes milliseconds, in which no stream moves."""
    looks: list[int] = []
    idle = listener._Connection.idle
    monkeypatch.setattr(listener._Connection, "idle", property(lambda one: looks.append(1) or idle.fget(one)))  # type: ignore[attr-defined]
    async with serving(most=32) as it:
        flood = [await connected(it.url) for _ in range(32 + 64)]
        assert 200 == await status(it.url)
        assert len(looks) <= (64 / (32 // listener.ROOM_SHARE) + 2) * 32
        for _, writer in flood:
            writer.close()


async def test_without_descriptors_connections_wait(caplog, monkeypatch):
    """Without descriptors connections wait until there are some."""
    monkeypatch.setattr(listener, "ACCEPT_AGAIN_S", 0.01)
    async with serving() as it:
        host, port = it.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with socket.socket() as last:
                resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), hard))
            try:
                client.connect((host, int(port)))
                client.send(b"GET / HTTP/1.0\r\n\r\n")
                await until(lambda: "cannot accept a connection: Too many open files" in caplog.text)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            client.settimeout(60)
            assert b"200 OK" in await asyncio.to_thread(client.recv, 100)
        assert 200 == await status(it.url)
    assert 1 == caplog.text.count("cannot accept"), "it is said once a minute"


async def test_whom_a_listener_turned_away_is_counted_by_reason(tmp_path, authority, pair, monkeypatch):
    monkeypatch.setattr(listener_auth, "LOGINS_OF_ONE", 0)
    given = ListenerAuth(secured(tmp_path, pair, users=True))
    counted = listener.new_rejections()
    assert set(listener.REASONS) == {reason for reason, times in counted.items() if times == 0}
    async with serving(given, most=2, rejected=counted) as it:
        assert [401, 503] == [await status(it.url, tls=trusting(authority), **asked) for asked in ({}, LOGIN)]
        with pytest.raises(aiohttp.ClientError):
            await status(it.url)
        host, port = it.url.removeprefix("https://").split(":")
        monkeypatch.setattr(listener, "HEAD_S", 0.1)
        reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting(authority))
        await ends(reader)
        writer.close()
        silent = [await connected(it.url) for _ in range(3)]
        await until(lambda: counted["gave_way"])
        for _, one in silent:
            one.close()
    assert (1, 1, 1, 1) == (counted["login"], counted["logins_waiting"], counted["slow_head"], counted["gave_way"])
    assert counted["handshake"] >= 1


async def test_connections_that_ended_are_not_counted(tmp_path, authority, pair):
    async with serving(ListenerAuth(secured(tmp_path, pair)), most=2) as it:
        for _ in range(5):
            assert 200 == await status(it.url, tls=trusting(authority))
            with pytest.raises(aiohttp.ClientError):
                await status(it.url.replace("https", "http"))
        await until(lambda: not it._open)


async def test_a_taken_address_is_told_with_the_way_out():
    async with serving() as it:
        runner, address = web.ServerRunner(web.Server(answer)), it.url.partition("://")[2]
        with pytest.raises(BadConfig, match=f"listen: {address} .*taken .* listen$"):
            await listen(runner, "listen", address)


@pytest.mark.parametrize("text", ["9401", ":9401", "host:", "host:x", "host:70000"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match=f"^'{text}' .* host:port, "):
        split_address(text)


def test_an_address_of_ipv6_loses_its_brackets():
    assert ("::1", 9401) == split_address("[::1]:9401")


def test_descriptors_bound_the_clients_of_a_gateway(monkeypatch):
    asked = []
    monkeypatch.setattr(listener.resource, "setrlimit", lambda _, limits: asked.append(limits))
    for want, limits in ((10_000, (1024, 524_288)), (128, (256, 512)), (10_000, (65_536, 65_536)), (32, (64, 64))):
        monkeypatch.setattr(listener.resource, "getrlimit", lambda _, limits=limits: limits)
        assert want == listener.clients_at_most()
    assert [(65_536, 524_288), (512, 512)] == asked


async def test_the_commands_of_the_page_make_files_that_work(tmp_path):
    """docs/guides/hardening.md, its first block, as it stands there."""
    page = (Path(__file__).parents[3] / "docs/guides/hardening.md").read_text()
    block = page.partition("```sh\n")[2].partition("```")[0].replace("python3 -c", f"{sys.executable} -c")
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-euc", block], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stderr
    hashed, password = (
        (tmp_path / "watcher.hash").read_text().strip(),
        (tmp_path / "watcher.password").read_text().strip(),
    )
    (tmp_path / "web.yml").write_text(
        "tls_server_config: {cert_file: sidecar.pem, key_file: sidecar.key}\nbasic_auth_users: {watcher:"
        f" '{hashed}'}}\n"
    )
    (tmp_path / "http.yml").write_text(
        "basic_auth: {username: watcher, password_file: watcher.password}\ntls_config: {ca_file: ca.pem}\n"
    )
    async with serving(ListenerAuth(tmp_path / "web.yml")) as it:
        assert 200 == await status(it.url, **asked(tmp_path / "http.yml"))
    assert password not in done.stdout + done.stderr


ANSWERS = re.compile(rb"HTTP/1\.[01] \d")


async def taken() -> None:
    """Give the listener, which runs in the same loop, turns to read what was written."""
    for _ in range(5):
        await asyncio.sleep(0)


async def exchanged(url: str, *sent: bytes) -> bytes:
    """All that comes back for these pieces, sent one by one, until the other side closes."""
    reader, writer = await connected(url)
    out = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        for piece in sent:
            writer.write(piece)
            await writer.drain()
            await taken()
        while got := await asyncio.wait_for(reader.read(1 << 16), 60):
            out += got
        out += b"(closed)"
    writer.close()
    return out


UPGRADES = {
    "h2c": (
        b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings:"
        b" AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n"
    ),
    "body": b"POST /read HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
    "websocket": b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "not-in-connection": b"GET /a HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\n\r\n",
    "connect": b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "chunks-of-1.0": (
        b"POST /read HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nTransfer-Encoding:"
        b" chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    ),
}


@pytest.mark.parametrize("cut", [None, 5, 40], ids=["at-once", "in-the-line", "in-the-head"])
@pytest.mark.parametrize("first", UPGRADES.values(), ids=UPGRADES)
async def test_nothing_behind_a_request_with_upgrade_is_answered(first, cut):
    """Bytes that follow such a request are never read as another one, however they are cut; aiohttp dropped some and
    read on in their middle."""
    paths: list[str] = []

    async def noting(request: web.BaseRequest) -> web.StreamResponse:
        paths.append(request.path)
        return await answer(request)

    second = b"GET /b HTTP/1.1\r\nHost: x\r\nX-Padding: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n\r\n"
    behind = second + b"GET /c HTTP/1.1\r\nHost: x\r\n\r\n"
    async with serving(handler=noting) as it:
        out = (
            await exchanged(it.url, first + behind)
            if cut is None
            else await exchanged(it.url, first + behind[:cut], behind[cut:])
        )
    assert (1, 1) == (out.count(b"HTTP/1."), out.count(b"HTTP/1.1 200") + out.count(b"HTTP/1.0 200"))
    assert out.endswith(b"(closed)")
    assert 1 == len(paths)
    assert not {"/b", "/c"} & set(paths)


async def test_requests_before_one_with_upgrade_are_answered_in_order():
    async with serving() as it:
        out = await exchanged(
            it.url, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2 + UPGRADES["h2c"] + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        )
    assert 3 == out.count(b"HTTP/1.1 200")
    assert 1 == out.lower().count(b"connection: close")


async def overrun(url: str, *behind: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with a request that runs, and what comes behind it."""
    reader, writer = await connected(url)
    for piece in (b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n", *behind):
        writer.write(piece)
        await taken()
    return reader, writer


BEHIND = {
    "requests": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100],
    "six-requests": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"] * 6,
    "body": [b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n" + b"a" * 2_000_000],
    "bodies": [b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n" + b"a" * 60_000] * 3,
    "tail": [UPGRADES["websocket"] + b"a" * 2_000_000],
}


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.SelectorEventLoop])
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_disconnect_ends_the_running_request(behind, loop, monkeypatch):
    """aiohttp stops reading such a connection, so it never learned that the client was gone."""
    monkeypatch.setattr(listener, "PIPELINED_S", 0.05)

    async def run() -> None:
        running, ended = asyncio.Event(), asyncio.Event()

        async def slow(request: web.BaseRequest) -> web.StreamResponse:
            if request.path != "/slow":
                return await answer(request)
            running.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
            return web.Response()

        async with serving(handler=slow, hang_ups=True) as it:
            _, writer = await overrun(it.url, *behind)
            await asyncio.wait_for(running.wait(), 30)
            writer.transport.abort()
            await asyncio.wait_for(ended.wait(), 30)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


async def test_too_much_behind_a_running_request_closes(monkeypatch):
    """A connection with too much behind a running request is closed and counted."""
    monkeypatch.setattr(listener, "PIPELINED_S", 0.05)

    async def slow(request: web.BaseRequest) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    async with serving(handler=slow, hang_ups=True) as it:
        reader, writer = await overrun(it.url, *BEHIND["six-requests"])
        await ends(reader)
        assert 1 == it.rejected["pipelined"]
        writer.close()


async def test_few_requests_behind_a_running_one_wait(monkeypatch):
    """A few requests behind a running one wait and short ones pass in any number."""
    monkeypatch.setattr(listener, "PIPELINED_S", 3600)  # this test looks whenever a hundred more were answered
    one, last = (b"GET / HTTP/1.1\r\nHost: x\r\n%s\r\n" % more for more in (b"", b"Connection: close\r\n"))
    answered_at_looks, times = [0], iter(range(1, 1000))

    async def brief_ones(request: web.BaseRequest) -> web.StreamResponse:
        connection: Any
        [connection] = it._open
        if request.path == "/slow":
            await until(lambda: connection._request_count == 1 + listener.PIPELINED)
            assert connection._overrun is None
        elif request.path == "/many" and next(times) % 100 == 0:
            connection._overrun.cancel()
            connection._check_overrun(answered_at_looks[-1])
            answered_at_looks.append(connection._answered)
        return await answer(request)

    async with serving(handler=brief_ones, hang_ups=True) as it:
        few = (one.replace(b"/ ", b"/slow "), one * (listener.PIPELINED - 1) + last)
        assert 1 + listener.PIPELINED == (await exchanged(it.url, *few)).count(b"HTTP/1.1 200")
        await until(lambda: not it._open)
        many = one.replace(b"/ ", b"/many ")
        assert 500 == (await exchanged(it.url, many * 499 + last)).count(b"HTTP/1.1 200")
        assert 5 == len(answered_at_looks)
        await until(lambda: not it._open)
        large = b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"a" * 1_000_000
        large_last = large.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")
        assert 4 == (await exchanged(it.url, large * 3 + large_last)).count(b"HTTP/1.1 200")
        assert 0 == it.rejected["pipelined"]


@pytest.mark.parametrize("secure", [False, True])
async def test_refused_requests_that_owe_their_body_keep_nobody_out(secure, tmp_path, authority, pair):
    """As many as there may be connections, each with an answer and a body that never comes; new ones come as fast as
    they go. Scrapes go on."""
    given = ListenerAuth(secured(tmp_path, pair, users=True)) if secure else None
    most, wires = 64, []
    tls = {"ssl": trusting(authority)} if secure else {}

    async def refused() -> None:
        wires.append(await asyncio.open_connection(*split_address(it.url.partition("://")[2]), **tls))
        reader, writer = wires[-1]
        writer.write(b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")

    async def none(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=404) if request.method == "POST" else web.Response(text="figures\n")

    async with serving(given, none, most=most) as it:
        for _ in range(3):
            await asyncio.gather(*(refused() for _ in range(most)))
            assert 200 == await status(it.url, tls=trusting(authority), **LOGIN)
        assert 0 == it.rejected["full"]
        for _, writer in wires:
            writer.transport.abort()


async def test_refused_request_may_send_its_body_given_room():
    """The answer would be lost in a connection that is cut while its client still sends."""
    async with serving(handler=lambda request: asyncio.sleep(0, web.Response(status=413))) as it:
        out = await exchanged(
            it.url,
            b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 3000000\r\n\r\n",
            *[b"a" * 300_000] * 10,
        )
    assert b" 413 " in out


@pytest.mark.parametrize(
    ("want", "reason", "sent"),
    [
        (431, "head_too_large", b"GET /" + b"SECRET" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
        (431, "head_too_large", b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"SECRET" * 9000 + b"\r\n\r\n"),
        (431, "head_too_large", b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X" * 9000 + b": SECRET\r\n\r\n"),
        (431, "head_too_large", b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-SECRET: a\r\n" * 300 + b"\r\n"),
        (400, "bad_request_line", b"\x16\x03\x01\x02\x00SECRET\r\n\r\n"),
        (400, "bad_request_line", b"SECRET / HTTP/1.1\r\n\r\n"),
        (400, "bad_request_line", b"GET / HTTP/9.9SECRET\r\n\r\n"),
        (400, "bad_request_line", b"GET SECRET HTTP/1.1\r\nHost: x\r\n\r\n"),
        (400, "bad_framing", b"GET / HTTP/1.1\r\nHost: x\r\nSECRET\r\n\r\n"),
        (
            400,
            "bad_framing",
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nSECRET",
        ),
        (400, "bad_framing", b"GET / HTTP/1.1\r\n\r\n"),
    ],
)
async def test_parser_refusals_are_counted_and_not_echoed(want, reason, sent):
    """What the parser refuses is counted by reason and never echoed."""
    async with serving() as it:
        out = await exchanged(it.url, sent + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" %d " % want == out[8:13]
        assert b"SECRET" not in out
        assert {reason: 1} == {name: times for name, times in it.rejected.items() if times}
        assert 1 == len(ANSWERS.findall(out))


async def test_two_authorization_headers_are_refused(tmp_path):
    """Two authorization headers are refused where a login is asked for."""
    async with serving(ListenerAuth(secured(tmp_path, tokens=True))) as it:
        right = f"Authorization: Bearer {TOKEN}\r\n".encode()
        for sent, want in ((right, b"200"), (right * 2, b"400"), (right + b"Authorization: Bearer x\r\n", b"400")):
            response = await exchanged(it.url, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + sent + b"\r\n")
            assert want == response[9:12]


async def test_broken_body_framing_ends_the_request():
    """The handler that reads it would wait for an end that cannot come."""
    async with serving(hang_ups=True) as it:
        head = b"POST /read HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        for pieces in ((head + b"3\r\nabc\r\n", b"SECRET\r\n"), (head + b"3\r\nabc\r\nSECRET\r\n",)):
            assert 1 == len(ANSWERS.findall(await exchanged(it.url, *pieces)))
        assert 2 == it.rejected["bad_framing"]
