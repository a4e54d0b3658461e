"""Alertmanager configuration as the Prometheus Operator makes it of an AlertmanagerConfig.

After pkg/alertmanager/amcfg.go of release 0.93: addAlertmanagerConfigs, processRoute, processInhibitRule. Secrets
become words, since amtool reads none."""

from __future__ import annotations

import re
from typing import Any

_SECRETS = {"urlSecret": "url", "apiURL": "api_url", "routingKey": "routing_key", "authPassword": "auth_password"}
_ADDRESSES = ("url", "api_url")
_PAIRS = ("details", "headers")
_FIELDS = {"receiver", "groupBy", "groupWait", "groupInterval", "repeatInterval", "matchers", "continue", "routes"}


def configuration(made: dict[str, Any], namespace: str, strategy: str) -> dict[str, Any]:
    """Return a whole configuration: the cluster's own route to `null`, and the object's as its first child."""
    prefix, spec = f"{namespace}/{made['metadata']['name']}/", made["spec"]
    scoped = [f'namespace="{namespace}"'] if strategy == "OnNamespace" else []
    first = _route(spec["route"], prefix)
    first = {**first, "matchers": [*first.get("matchers", []), *scoped], "continue": True}
    return {
        "route": {"receiver": "null", "group_by": ["job"], "routes": [first]},
        "inhibit_rules": [
            {
                "source_matchers": [*map(_matcher, rule["sourceMatch"]), *scoped],
                "target_matchers": [*map(_matcher, rule["targetMatch"]), *scoped],
                "equal": rule["equal"],
            }
            for rule in spec["inhibitRules"]
        ],
        "receivers": [{"name": "null"}, *(_receiver(each, prefix) for each in spec["receivers"])],
    }


def _route(route: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Refuses unknown fields, as the operator does for children, which the API server does not check."""
    assert set(route) <= _FIELDS, set(route) - _FIELDS
    made = {_snake(key): value for key, value in route.items() if key not in ("matchers", "routes")}
    made["receiver"] = prefix + route["receiver"]
    if "matchers" in route:
        made["matchers"] = [_matcher(each) for each in route["matchers"]]
    if "routes" in route:
        made["routes"] = [_route(each, prefix) for each in route["routes"]]
    return made


def _matcher(matcher: dict[str, str]) -> str:
    return f'{matcher["name"]}{matcher["matchType"]}"{matcher["value"]}"'


def _receiver(receiver: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {
        _snake(key): prefix + value if key == "name" else [_integration(each) for each in value]
        for key, value in receiver.items()
    }


def _integration(settings: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in settings.items():
        if key in _SECRETS:
            assert set(value) == {"name", "key"}
            made[_SECRETS[key]] = "https://example.org/" if _SECRETS[key] in _ADDRESSES else "a-word"
        elif key in _PAIRS:
            made[key] = {each["key"]: each["value"] for each in value}
        elif key == "pagerDutyLinkConfigs":
            made["links"] = [{"href": link["href"], "text": link["alt"]} for link in value]
        else:
            made[_snake(key)] = value
    return made


def _snake(words: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", lambda found: f"_{found[1].lower()}", words)
