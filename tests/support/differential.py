"""Requests generated from an engine's OpenAPI document, and a comparison of two answers to each of them.

JSON values are text here, so that a body can hold what Python's encoder does not write: 1e400, or a field twice."""

from __future__ import annotations

import http.client
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = Mapping[str, str]  # name -> JSON
Document = Mapping[str, Any]
IDS = "X-Request-Id"
JSON = (("Content-Type", "application/json"),)
WRONG = 'null true 5 -1 1.5 "x" "" "5" [] {} [1] ["x"] [{}] 1e400 123456789012345678901'
INNER = 'null true -1 "x" [1] {}'  # values of a field of an object in a field
ENCODINGS = "utf-8-sig utf-16 utf-16-le utf-16-be utf-32 utf-32-le"
TEXTS = re.compile(r"\.(content|text|delta|reasoning|arguments|thinking|partial_json|token_ids\[\])$")
REASONS = re.compile(r"finish_reason$|\.stop_reason$|\.incomplete_details\.reason$|\.response\.status$")


@dataclass(frozen=True, slots=True)
class Case:
    """A request. change: what sets it apart from the valid request of its route."""

    path: str
    change: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = JSON
    method: str = "POST"

    @property
    def label(self) -> str:
        return f"{self.path} {self.change}"

    @property
    def has_id(self) -> bool:
        """Return whether it brings a request id of its own."""
        return self.change.removeprefix("stream ").startswith(('request_id="', f"header {IDS}"))


@dataclass(slots=True)
class Answer:
    """An answer as a client sees it. fields: paths of all values that are not null. names: ids that the client chose.
    texts, reasons: by path and choice. usage: the last one of a stream."""

    status: int
    kind: str = ""
    request_id: str = ""
    names: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    reasons: set[tuple[str, int, str]] = field(default_factory=set)
    texts: dict[tuple[str, int], str] = field(default_factory=lambda: defaultdict(str))
    usage: dict[str, Any] = field(default_factory=dict)

    def read(self, text: str) -> None:
        """Take in a document, or the events of a stream."""
        for line in text.splitlines() if self.kind == "text/event-stream" else [text]:
            data = line.removeprefix("data: ")
            try:
                document = json.loads(data) if data[:1] in ("{", "[") else data
            except ValueError:
                document = "[DONE]" if data == "[DONE]" else "not JSON"
            for path, choice, value in _walk(document, "", 0):
                if value is not None:
                    self._note(path, choice, value)

    def _note(self, path: str, choice: int, value: Any) -> None:
        self.fields.add(path)
        if REASONS.search(path):
            self.reasons.add((path, choice, str(value)))
        if path in (".id", ".request_id", ".message.id") and not str(value).startswith("resp_"):
            self.names.add(str(value))
        if TEXTS.search(path) and isinstance(value, str | int):
            self.texts[path, choice] += str(value)
        if path.endswith((".usage", ".billed_units")) and isinstance(value, dict):
            self.usage |= value

    @property
    def tokens(self) -> tuple[int, int] | None:
        """Return the tokens read and made; None without usage."""
        read = self.usage.get("prompt_tokens", self.usage.get("input_tokens"))
        made = self.usage.get("completion_tokens", self.usage.get("output_tokens"))
        return None if read is None else (read, made or 0)


def _walk(value: Any, path: str, choice: int) -> Iterator[tuple[str, int, Any]]:
    yield path, choice, value
    if isinstance(value, dict):
        choice = index if isinstance(index := value.get("index"), int) else choice
        for name, inner in value.items():
            # here names are tokens
            yield from _walk(inner, f"{path}.{'*' if path.endswith('logprobs[]') else name}", choice)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner, path + "[]", choice)


def differences(direct: Answer, through: Answer, *, exact: bool) -> list[str]:
    """Return each difference in few words. exact: whether the texts are known to be equal."""
    if direct.status != through.status:
        return [f"status {direct.status} {through.status}"]
    if direct.status != 200:
        return []
    lost, added = sorted(direct.fields - through.fields), sorted(through.fields - direct.fields)
    parts = ("kind", "names", "reasons", "usage", *["texts"] * exact)
    pairs = [(part, getattr(direct, part), getattr(through, part)) for part in parts]
    shown = [f"{part} {one} {other}" for part, one, other in pairs if one != other]
    return [f"fields -{lost} +{added}"] * bool(lost or added) + shown


class OldConnection(http.client.HTTPConnection):
    _http_vsn, _http_vsn_str = 10, "HTTP/1.0"


class Client:
    """A kept connection to an engine, or to a gateway with a key."""

    def __init__(self, url: str, key: str = "") -> None:
        self._host, self._key = url.removeprefix("http://"), key
        self._connection = http.client.HTTPConnection(self._host, timeout=60)

    def send(self, case: Case, request_id: str, *, again: bool = False) -> Answer:
        """Return the answer; status 0 without one. again: on a new connection, since the server closed the kept one."""
        connection = OldConnection(self._host, timeout=60) if case.change == "HTTP/1.0" else self._connection
        try:
            connection.putrequest(case.method, case.path, skip_accept_encoding=True)
            for name, value in [("Authorization", f"Bearer {self._key}"), *case.headers]:
                connection.putheader(name, value.encode())
            if not case.has_id:
                connection.putheader(IDS, request_id)
            connection.putheader("Content-Length", str(len(case.body)))
            connection.endheaders(case.body)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return Answer(0, type(error).__name__) if again else self.send(case, request_id, again=True)
        answer = Answer(response.status, response.headers.get_content_type(), response.headers.get(IDS, ""))
        try:
            body = response.read()
        except http.client.IncompleteRead as error:
            body = error.partial
            answer.fields.add("broken off")
            connection.close()
        answer.read(body.decode(errors="replace"))
        answer.read(response.headers.get("metadata", "null"))  # usage of embeddings as bytes
        return answer


def variants(document: Document, schema: Document) -> list[Document]:
    """Return a schema's alternatives, without references."""
    if "$ref" in schema:
        return variants(document, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    inner = schema.get("anyOf") or schema.get("oneOf")
    return [each for one in inner for each in variants(document, one)] if inner else [schema]


def schemas(document: Document, path: str) -> dict[str, Document]:
    """Return the schema of each field of a route's requests."""
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return {
        name: schema
        for model in variants(document, content["schema"])
        for name, schema in model.get("properties", {}).items()
    }


def wrong_values(document: Document, schema: Document, valid: str) -> list[str]:
    """Return values to try: of other types, at the bounds, of an enum, objects with one wrong field beside the valid
    ones."""
    tried = WRONG.split()
    around = {name: json.dumps(inner) for name, inner in json.loads(valid).items()} if valid[:1] == "{" else {}
    for each in variants(document, schema):
        tried += [json.dumps(value) for value in each.get("enum", [each.get("const")])]
        bounds = [int(each[bound]) for bound in ("minimum", "maximum") if bound in each]
        tried += [str(bound + step) for bound in bounds for step in (-1, 0, 1)]
        tried += [with_field(around, name, wrong) for name in each.get("properties", ()) for wrong in INNER.split()]
    return list(dict.fromkeys(tried))


def with_field(fields: Fields, name: str = "", value: str = "") -> str:
    """Return a JSON object with this field; without it where the value is empty."""
    changed = {**fields, name: value}
    return "{" + ",".join(f'"{key}":{inner}' for key, inner in changed.items() if inner) + "}"


def field_cases(
    document: Document,
    path: str,
    valid: Fields,
    special: Mapping[str, list[str]],
    twice: Mapping[str, list[str]],
    most: int,
) -> Iterator[Case]:
    """Change one field at a time, in a stream or not: `most` values of each field, the choice of which depends on its
    name and route alone; all that are special, and both ways those in `twice`, of fields that the route has."""
    known = schemas(document, path)
    streams = [valid, {**valid, "stream": "true"}] if "stream" in known else [valid]
    for name in dict.fromkeys([*known, *valid, *special, *twice]):
        chance = random.Random(path + name)
        tried = special.get(name) or twice.get(name) or wrong_values(document, known.get(name, {}), valid.get(name, ""))
        if name not in {**special, **twice} or name not in {**known, "unknown": {}}:
            tried = chance.sample(tried, min(most, len(tried)))
        for value in [*tried, *[""] * (name in valid)]:
            for base in streams if name in twice and name in known else [chance.choice(streams)]:
                change = f"{'stream ' * (base is not valid)}{name}={value[:150]}"
                yield Case(path, change, with_field(base, name, value).encode("utf-8", "surrogatepass"))


def odd_bodies(path: str, valid: Fields) -> Iterator[Case]:
    """Encode a valid body otherwise, or write what is no JSON object, or hardly."""
    text = with_field(valid)
    body = text.encode()
    bodies = {name: text.encode(name) for name in ENCODINGS.split()} | {
        "empty": b"", "space": b" ", "list": b"[]", "null": b"null", "comma": body[:-1] + b",}",
        "garbage": body + b"x", "white space": b" \r\n\t" + body + b"\n ", "cut": body[:-1],
        "form feed": body + b"\f", "nul": body + b"\0",
        "bad utf-8": body[:-1] + b',"unknown":"\xff"}',
    }  # fmt: skip
    for depth in (100, 500, 5000):
        bodies[f"depth {depth}"] = with_field(valid, "unknown", "[" * depth + "]" * depth).encode()
    return (Case(path, name, each) for name, each in bodies.items())
