"""Stands in for Grafana: starts only if Grafana's inputs are there for Grafana's user, and answers its health page.

Knows nothing of dashboards or data sources: that provisioning loads is for a real Grafana to show."""

import http.server
import os
import pathlib
import sys

password = pathlib.Path(os.environ["GF_SECURITY_ADMIN_PASSWORD__FILE"]).read_text().strip()
provisioning = sorted(str(path) for path in pathlib.Path("/etc/grafana/provisioning").glob("*/*.yml"))
home = pathlib.Path(os.environ["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
if len(password) < 16 or len(provisioning) != 2 or not home.exists():
    sys.exit(f"password of {len(password)} characters, provisioning {provisioning}, home board {home} exists: {home.exists()}")
pathlib.Path("/var/lib/grafana/grafana.db").touch()


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path == "/api/health"
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(b'{"database": "ok"}' if known else b"this is a stand-in for Grafana")

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("0.0.0.0", 3000), Health).serve_forever()  # noqa: S104
