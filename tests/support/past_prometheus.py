"""A real Prometheus that holds the series of an OpenMetrics file."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.wait import eventually


@contextmanager
def past_prometheus(
    path: Callable[[str], Path], page: Path, folder: Path, port: int, release: str = ""
) -> Iterator[str]:
    """Serve what an OpenMetrics file holds from a folder; yield the address. path: of a part, such as promtool-3.12."""
    made = [
        path(f"promtool{release}"), "tsdb", "create-blocks-from",
        "--max-block-duration=486h",  # not one for each 2 h
        "openmetrics", "--quiet", page, folder / "data",
    ]  # fmt: skip
    done = subprocess.run(made, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    (folder / "prometheus.yml").write_text("{}\n")
    command = [
        path(f"prometheus{release}"), f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data", "--storage.tsdb.retention.time=100y",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        ready = f"http://127.0.0.1:{port}/-/ready"
        eventually(lambda: 200 == urllib.request.urlopen(ready, timeout=5).status, what="a ready Prometheus")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)
