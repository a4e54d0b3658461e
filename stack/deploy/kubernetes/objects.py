"""Kubernetes objects of base/*.yaml with their $WORDS filled in."""

from __future__ import annotations

import importlib.resources
import re
from typing import Any

import yaml

Object = dict[str, Any]

GATEWAY, BOARD, SIDECAR_NAME = "vllm-watch-gateway", "vllm-watch-board", "vllm-watch-sidecar"
STORE_NAME = "vllm-watch-store"
GATEWAY_SERVICE, METRICS_SERVICE, BOARD_SERVICE = "watch-gateway", "watch-metrics", "watch-board"
REPLICAS_SERVICE, STORE_SERVICE = "watch-gateways", "watch-store"
SIDECAR = {"vllm-watch-sidecar": "true"}  # a label of pods with our sidecar but without our gateway
CLIENTS = {"vllm-watch-clients": "true"}  # a label of namespaces: whose pods may ask the gateway and open the board
# Name and number of each port, as base/*.yaml has them.
PORTS = {"http": 8000, "gateway-metrics": 8010, "sidecar": 9401, "board": 9402, "ship": 9403}

OMIT: Any = object()  # value of a $WORD whose key is left out
_WORD = re.compile(r"\$([A-Z_]+)")


def load(name: str, **words: Any) -> list[Object]:
    """Return the objects of a file in base/, each scalar $WORD replaced by the value of that name.

    Raises KeyError for a $WORD without a value."""
    text = importlib.resources.files("stack.deploy.kubernetes").joinpath("base", name).read_text(encoding="utf-8")
    return [_filled(each, words) for each in yaml.safe_load_all(text)]


def load_one(name: str, **words: Any) -> Object:
    """Return the one object of a file in base/."""
    [found] = load(name, **words)
    return found


def given(values: Object) -> Object:
    """Return the values without those that are OMIT."""
    return {key: value for key, value in values.items() if value is not OMIT}


def _filled(value: Any, words: dict[str, Any]) -> Any:
    match value:
        case dict():
            return given({key: _filled(each, words) for key, each in value.items()})
        case list():
            return [_filled(each, words) for each in value]
        case str() if found := _WORD.fullmatch(value):
            return words[found[1]]
        case _:
            return value


def add_labels(made: Object, labels: tuple[tuple[str, str], ...]) -> Object:
    """Return the object with more labels."""
    metadata = made["metadata"]
    return {**made, "metadata": {**metadata, "labels": {**metadata["labels"], **dict(labels)}}}
