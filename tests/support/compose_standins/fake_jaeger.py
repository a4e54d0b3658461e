"""Stands in for Jaeger: takes OTLP over HTTP on 4318 and tells on 16686 whether a trace id, or a word, was in what
came."""

import gzip
import http.server
import threading

received = []


class Take(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        received.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


class Tell(Take):
    def do_GET(self):
        trace = self.path.removeprefix("/api/traces/")
        found = self.path != trace and any(bytes.fromhex(trace) in body for body in received)
        self.send_response(200 if found else 404)
        self.end_headers()


threading.Thread(target=http.server.ThreadingHTTPServer(("0.0.0.0", 4318), Take).serve_forever, daemon=True).start()  # noqa: S104
http.server.ThreadingHTTPServer(("0.0.0.0", 16686), Tell).serve_forever()  # noqa: S104
