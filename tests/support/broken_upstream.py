"""Upstream that looks healthy and cuts each request after a while."""

from __future__ import annotations

import socket
import time
from http.server import BaseHTTPRequestHandler


class BrokenUpstream(BaseHTTPRequestHandler):
    """Handler of its connections. fails_after_s: from a request until its connection is cut."""

    fails_after_s = 0.0

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.fails_after_s)
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Log nothing."""
