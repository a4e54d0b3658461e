"""A Prometheus for benches: readiness and queries."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request

from dashboards.interpolate import Range
from dashboards.model import Shape
from tests.support.wait import eventually


def until_ready(base: str, path: str = "/-/ready") -> None:
    eventually(lambda: urllib.request.urlopen(f"{base}{path}", timeout=1).read(), f"an answer of {base}")


def url_of(base: str, expr: str, over: Range, shape: Shape) -> str:
    if shape in (Shape.NUMBER, Shape.TABLE):
        return f"{base}/api/v1/query?{urllib.parse.urlencode({'query': expr, 'time': over.end_s - 1})}"
    span = {"query": expr, "start": over.start_s, "end": over.end_s, "step": over.step_s}
    return f"{base}/api/v1/query_range?{urllib.parse.urlencode(span)}"


def timed(url: str) -> float:
    began = time.monotonic()
    get(url)
    return time.monotonic() - began


def get(url: str) -> None:
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert "success" == json.loads(answer.read())["status"]
