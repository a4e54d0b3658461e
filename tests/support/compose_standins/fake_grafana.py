"""Stands in for Grafana: starts only if Grafana's inputs are there for Grafana's user, and answers its health page;
over TLS where Grafana would. It asks Prometheus, at /prometheus, with the login and the authority that the data
source's file names.

Knows nothing of dashboards or data sources: that provisioning loads is for a real Grafana to show."""

import http.server
import os
import pathlib
import re
import ssl
import sys
import urllib.request

password = pathlib.Path(os.environ["GF_SECURITY_ADMIN_PASSWORD__FILE"]).read_text().strip()
provisioning = sorted(str(path) for path in pathlib.Path("/etc/grafana/provisioning").glob("*/*.yml"))
home = pathlib.Path(os.environ["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
if len(password) < 16 or len(provisioning) != 2 or not home.exists():
    sys.exit(
        f"password of {len(password)} characters, provisioning {provisioning}, home board {home} exists:"
        f" {home.exists()}"
    )
pathlib.Path("/var/lib/grafana/grafana.db").touch()
source = pathlib.Path("/etc/grafana/provisioning/datasources/datasources.yml").read_text()
files = {name: pathlib.Path(path).read_text() for name, path in re.findall(r"(\w+): \$__file\{(.*)\}", source)}


def ask_prometheus():
    logins = urllib.request.HTTPPasswordMgrWithPriorAuth()
    logins.add_password(
        None, "https://prometheus:9090", "grafana", files["basicAuthPassword"].strip(), is_authenticated=True
    )
    tls = urllib.request.HTTPSHandler(context=ssl.create_default_context(cadata=files["tlsCACert"]))
    return (
        urllib.request.build_opener(tls, urllib.request.HTTPBasicAuthHandler(logins))
        .open("https://prometheus:9090/api/v1/query?query=up")
        .read()
    )


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = {"/api/health": lambda: b'{"database": "ok"}', "/prometheus": ask_prometheus}
        answer = known.get(self.path, lambda: b"this is a stand-in for Grafana")()
        self.send_response(200 if self.path in known else 404)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("0.0.0.0", 3000), Health)  # noqa: S104
if os.environ.get("GF_SERVER_PROTOCOL") == "https":
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(os.environ["GF_SERVER_CERT_FILE"], os.environ["GF_SERVER_CERT_KEY"])
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
