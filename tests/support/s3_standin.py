"""Stand-in of an S3-compatible store for tests: no real store can be had here.

It keeps objects in memory, checks the SigV4 signature of every request against AWS's published algorithm (headers,
canonical query, payload hash, clock), supports GET, HEAD, PUT with If-None-Match and If-Match, DELETE, and
ListObjectsV2, and misbehaves on demand. It is no proof for a particular store."""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

ACCESS_KEY, SECRET_KEY, REGION, BUCKET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "eu-test-1", "logs"
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/s3/aws4_request, ?SignedHeaders=([^,]+), ?Signature=(\w{64})"
)


class S3Standin:
    """Server on loopback. faults: list of (method, key part, fault) that apply once each, in order.

    fault: "500": error, nothing stored. A status and XML: that answer, nothing stored. "stored then 500", "stored then
    cut": stored, and the client hears an error or nothing. "late": an error, and the request is applied when the next
    PUT of the key arrives. "deleted": the object is gone when the request arrives. late: keys that listings do not
    show."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults: list[tuple[str, str, str]] = []
        self.late: set[str] = set()
        self.delayed: list[tuple[BaseHTTPRequestHandler, str, str, bytes]] = []
        self.requests: list[tuple[str, str, int]] = []
        self.rejected: list[str] = []
        self.lock = threading.RLock()
        standin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # an answer is two writes; the second would wait for an acknowledgement

            def handle_any(self) -> None:
                standin.handle(self)

            do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = handle_any  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        url = urlsplit(request.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        with self.lock:
            if why := signature_error(request, body):
                self.rejected.append(why)
                text = f"<Error><Code>SignatureDoesNotMatch</Code><Message>{why}</Message></Error>"
                self._answer(request, 403, text, {"x-amz-bucket-region": REGION})
                return
            fault = next((f for f in self.faults if f[0] == request.command and f[1] in key), None)
            if fault:
                self.faults.remove(fault)
                if fault[2] == "late":
                    self.delayed.append((request, bucket, key, body))
                    self._answer(request, 400, "<Error><Code>RequestTimeout</Code></Error>")
                    return
                if fault[2] == "deleted":
                    self.objects.pop(key, None)
                    fault = None
                elif fault[2][:3].isdigit():
                    text = fault[2][4:] or "<Code>InternalError</Code>"
                    self._answer(request, int(fault[2][:3]), f"<Error>{text}</Error>")
                    return
            for one in [one for one in self.delayed if request.command == "PUT" and one[2] == key]:
                self.delayed.remove(one)
                self._do(*one[:3], {}, one[3])
            status, text, headers, data = self._do(request, bucket, key, dict(parse_qsl(url.query)), body)
            self.requests.append((request.command, key, status))
            if fault and fault[2] == "stored then cut":
                request.close_connection = True
                request.connection.close()
            elif fault:
                self._answer(request, 500, "<Error><Code>InternalError</Code></Error>")
            else:
                self._answer(request, status, text, headers, data)

    def _do(
        self, request: BaseHTTPRequestHandler, bucket: str, key: str, query: dict[str, str], body: bytes
    ) -> tuple[int, str, dict[str, str], bytes | None]:
        if bucket != BUCKET:
            return 404, "<Error><Code>NoSuchBucket</Code></Error>", {}, None
        found = self.objects.get(key)
        if request.command in ("GET", "HEAD") and key:
            if found is None:
                return 404, "<Error><Code>NoSuchKey</Code></Error>", {}, None
            return 200, "", {"ETag": etag(found), "Last-Modified": "Wed, 25 Nov 2026 10:00:00 GMT"}, found
        if request.command == "GET":
            return 200, self._listing(query), {}, None
        if request.command == "PUT":
            if request.headers.get("If-None-Match") == "*" and found is not None:
                return 412, "<Error><Code>PreconditionFailed</Code></Error>", {}, None
            wanted = request.headers.get("If-Match")
            if wanted and (found is None or etag(found) != wanted):
                return 412, "<Error><Code>PreconditionFailed</Code></Error>", {}, None
            self.objects[key] = body
            return 200, "", {"ETag": etag(body)}, None
        if request.command == "DELETE":
            self.objects.pop(key, None)
            return 204, "", {}, None
        return 501, "<Error><Code>NotImplemented</Code></Error>", {}, None

    def _listing(self, query: dict[str, str]) -> str:
        keys = [key for key in sorted(self.objects) if key.startswith(query.get("prefix", "")) and key not in self.late]
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-25T10:00:00.000Z</LastModified>"
            f"<ETag>{escape(etag(self.objects[key]))}</ETag><Size>{len(self.objects[key])}</Size></Contents>"
            for key in keys
        )
        return (
            f"<ListBucketResult><Name>{BUCKET}</Name><IsTruncated>false</IsTruncated><KeyCount>{len(keys)}</KeyCount>"
            f"{items}</ListBucketResult>"
        )

    def _answer(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        text: str = "",
        headers: dict[str, str] | None = None,
        data: bytes | None = None,
    ) -> None:
        payload = text.encode() if data is None else data
        request.send_response(status)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        if status != 204:
            request.send_header("Content-Length", str(len(payload)))
        request.end_headers()
        if request.command != "HEAD" and status != 204:
            request.wfile.write(payload)


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'  # noqa: S324 as S3 does it


def signature_error(request: BaseHTTPRequestHandler, body: bytes) -> str:
    """What is wrong with the signature of a request; empty if nothing is."""
    found = _AUTHORIZATION.fullmatch(request.headers.get("Authorization", ""))
    if not found:
        return "no SigV4 authorization"
    key, day, region, names, signature = found.groups()
    if (key, region) != (ACCESS_KEY, REGION):
        return "unknown access key or region"
    stamp = request.headers.get("x-amz-date", "")
    try:
        age = datetime.now(UTC) - datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return "no x-amz-date"
    if abs(age) > timedelta(minutes=15) or not stamp.startswith(day):
        return "the request is too old"
    signed = names.split(";")
    if not {"host", "x-amz-date", "x-amz-content-sha256"} <= set(signed):
        return "host, date and content must be signed"
    declared = request.headers["x-amz-content-sha256"]
    if declared != hashlib.sha256(body).hexdigest():
        return "the payload differs from its hash"
    path, _, query = request.path.partition("?")
    canonical_query = "&".join(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}"
        for name, value in sorted(parse_qsl(query, keep_blank_values=True))
    )
    headers = "".join(f"{name}:{' '.join(request.headers[name].split())}\n" for name in signed)
    canonical = "\n".join(
        (request.command, quote(unquote(path), safe="/-_.~"), canonical_query, headers, names, declared)
    )
    scope = f"{day}/{region}/s3/aws4_request"
    to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    secret = f"AWS4{SECRET_KEY}".encode()
    for part in (day, region, "s3", "aws4_request"):
        secret = hmac.new(secret, part.encode(), hashlib.sha256).digest()
    expected = hmac.new(secret, to_sign.encode(), hashlib.sha256).hexdigest()
    return "" if hmac.compare_digest(expected, signature) else "the signature does not match"


@contextmanager
def running() -> Iterator[S3Standin]:
    standin = S3Standin()
    try:
        yield standin
    finally:
        standin.close()
