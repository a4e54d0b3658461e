"""Stand-in for a prefill/decode router: the two calls of vLLM's own proxy example, and both engines in the headers of
the response, as Envoy can add them for llm-d. It chooses nothing: there is one engine of each role."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PREFILL_HEADER, DECODE_HEADER = "x-prefill-engine", "x-decode-engine"


@contextmanager
def routing(prefill: str, decode: str, between: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Route requests to these two engines; give the router's URL. between: called between the two calls."""

    class Router(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            first = {name: value for name, value in body.items() if name != "stream_options"} | {
                "stream": False,
                "max_tokens": 1,
                "kv_transfer_params": {
                    "do_remote_decode": True,
                    "do_remote_prefill": False,
                    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
                },
            }
            with self._post(prefill, first) as answer:
                handed = json.loads(answer.read()).get("kv_transfer_params")
            between()
            with self._post(decode, body | ({"kv_transfer_params": handed} if handed else {})) as answer:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.send_header(PREFILL_HEADER, prefill)
                self.send_header(DECODE_HEADER, decode)
                self.send_header("Connection", "close")
                self.end_headers()
                for line in answer:
                    self.wfile.write(line)
                    self.wfile.flush()

        def _post(self, engine: str, body: dict[str, Any]) -> Any:
            headers = {"Content-Type": "application/json", "X-Request-Id": self.headers["X-Request-Id"]}
            asked = urllib.request.Request(engine + self.path, json.dumps(body).encode(), headers)
            return urllib.request.urlopen(asked, timeout=60)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
