"""The recipe of `vllm-watch requests sink nats` against a real NATS server: its stream keeps each record once, also
when lines are sent again, after a restart too.

Vector is not run: a minimal exchange of the NATS protocol does what the recipe says."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from exporters.requests.record import RequestRecord, parse_line, to_line
from stack.cli import main
from tests.support.request_dataset import made_requests
from tests.support.wait import eventually

UNITS_NS = {"s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}


@dataclass
class NatsConnection:
    """Connection to a NATS server. One answer is awaited at a time."""

    wire: socket.socket

    def __post_init__(self) -> None:
        self._file = self.wire.makefile("rb")
        assert self._file.readline().startswith(b"INFO ")
        options = {"verbose": False, "pedantic": True, "headers": True, "no_responders": True, "lang": "test"}
        self.wire.sendall(b"CONNECT " + json.dumps(options).encode() + b"\r\nSUB inbox 1\r\nPING\r\n")
        assert b"PONG\r\n" == self._file.readline()

    def ask(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> Any:
        """Publish with a reply address; return the answer's JSON."""
        if headers is None:
            self.wire.sendall(b"PUB %b inbox %d\r\n%b\r\n" % (subject.encode(), len(payload), payload))
        else:
            head = "NATS/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
            sizes = f"{len(head)} {len(head) + len(payload)}"
            self.wire.sendall(f"HPUB {subject} inbox {sizes}\r\n{head}".encode() + payload + b"\r\n")
        while (line := self._file.readline()) == b"PING\r\n":  # the first one comes two seconds after CONNECT
            self.wire.sendall(b"PONG\r\n")
        found = re.fullmatch(rb"MSG inbox 1 (\d+)\r\n", line)
        assert found, line
        answer = self._file.read(int(found[1]) + 2)
        return json.loads(answer)


@dataclass
class NatsServer:
    """A real server with JetStream, on the address of the recipe's form."""

    program: Path
    port: int
    folder: Path

    def __enter__(self) -> NatsServer:
        command = [self.program, "-js", "-sd", self.folder, "-a", "127.0.0.1", "-p", str(self.port)]
        with (self.folder / "nats.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)

    def connect(self) -> NatsConnection:
        return NatsConnection(socket.create_connection(("127.0.0.1", self.port), timeout=20))


@pytest.fixture(scope="module")
def recipe() -> str:
    return CliRunner().invoke(main, ["requests", "sink", "nats"]).stdout


def stream_of(recipe: str) -> dict[str, Any]:
    """Return what the printed `nats stream add` sends to the server."""
    (line,) = re.findall(r"nats stream add (.*)", recipe)
    name, *words = shlex.split(line)
    assert "--defaults" == words.pop()
    options = dict(zip(words[::2], words[1::2], strict=True))
    window = re.fullmatch(r"(\d+)([smh])", options["--dupe-window"])
    assert {"--subjects", "--storage", "--dupe-window"} == set(options)
    assert window
    return {
        "name": name, "subjects": [options["--subjects"]], "storage": options["--storage"],
        "duplicate_window": int(window[1]) * UNITS_NS[window[2]],
    }  # fmt: skip


def message(sink: dict[str, Any], record: RequestRecord) -> tuple[bytes, dict[str, str]]:
    """Return body and headers that the sink makes of a line."""
    fields = msgspec.to_builtins(record)
    template = sink["jetstream"]["headers"]["message_id"]
    found = re.sub(r"\{\{ (\w+) \}\}", lambda each: str(fields[each[1]]), template)
    return to_line(record).rstrip(), {"Nats-Msg-Id": found}


def stored(connection: NatsConnection, stream: str, count: int) -> Iterator[RequestRecord]:
    for number in range(1, count + 1):
        asked = json.dumps({"seq": number}).encode()
        yield parse_line(b64decode(connection.ask(f"$JS.API.STREAM.MSG.GET.{stream}", asked)["message"]["data"]))


def test_a_stream_keeps_each_record_once(part, free_port, recipe: str, tmp_path: Path):
    sink = yaml.safe_load(recipe)["sinks"]["nats"]
    stream = stream_of(recipe)
    assert [sink["subject"]] == stream["subjects"]
    assert sink["jetstream"]["enabled"]
    records = made_requests(50)
    records.append(msgspec.structs.replace(records[0], span_id="0" * 15 + "1"))  # a client that sends its id again
    with NatsServer(part("nats").path, free_port(), tmp_path) as server:
        eventually(server.connect, what="the NATS server")
        connection = server.connect()
        made = connection.ask(f"$JS.API.STREAM.CREATE.{stream['name']}", json.dumps(stream).encode())
        assert "error" not in made, made
        first = [connection.ask(sink["subject"], *message(sink, one)) for one in records]
        again = [connection.ask(sink["subject"], *message(sink, one)) for one in records[:20]]
        assert [number + 1 for number in range(51)] == [one["seq"] for one in first]
        assert [False, True] == [any(one.get("duplicate") for one in first), all(one.get("duplicate") for one in again)]
    with server:
        eventually(server.connect, what="the NATS server again")
        connection = server.connect()
        assert all(connection.ask(sink["subject"], *message(sink, one)).get("duplicate") for one in records)
        state = connection.ask(f"$JS.API.STREAM.INFO.{stream['name']}", b"")["state"]
        assert (51, 51) == (state["messages"], state["last_seq"])
        assert records == list(stored(connection, stream["name"], 51))
