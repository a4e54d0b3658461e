"""Routes and inhibition of alerts/routing.py as an AlertmanagerConfig (v1alpha1) for the Prometheus Operator.

The operator makes its first-level route a child of the cluster's own, with `continue`, so everything else that
Alertmanager does stays. Under the default matcher strategy OnNamespace it also adds `namespace="<its own>"` to that
route and to every inhibition: alerts without that label would reach none of it. The object therefore needs the strategy
`None`, and its first route takes alerts of ours only, by their name.
Source: its pkg/alertmanager/amcfg.go, processRoute and processInhibitRule, release 0.93."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from alerts import registry, routing
from stack.deploy.kubernetes.objects import Object, add_labels, load_one
from stack.deploy.kubernetes.options import KubernetesOptions

NAME = "vllm-watch"
OURS = "VLLM.+"  # an Alert of another name cannot be constructed
STRATEGY = "alertmanagerConfigMatcherStrategy"
_MATCHER = re.compile(r'(?P<name>\w+)(?P<matchType>=~|!~|!=|=)"(?P<value>.*)"')
_SECRETS = {
    "url_file": "urlSecret",
    "api_url_file": "apiURL",
    "routing_key_file": "routingKey",
    "auth_password_file": "authPassword",
}
_PAIRS = ("details", "headers")  # maps of Alertmanager that the operator takes as lists of key and value


def alertmanager_config(wanted: KubernetesOptions) -> Object:
    """Return the AlertmanagerConfig with the routes of all alerts."""
    settings, objectives = wanted.rules.settings, wanted.rules.objectives
    rules = routing.inhibitions(registry.alerts(settings, objectives), registry.recordings(settings, objectives))
    made = load_one(
        "routes.yaml",
        NAME=NAME,
        ROUTE={**_route(routing.route()), "matchers": [{"name": "alertname", "matchType": "=~", "value": OURS}]},
        INHIBIT_RULES=[_inhibition(rule) for rule in rules],
        RECEIVERS=[_receiver(each, wanted.routes_secret) for each in routing.receivers_of(wanted.routes or "none")],
    )
    return add_labels(made, wanted.operator_labels)


def warnings(wanted: KubernetesOptions) -> Iterator[str]:
    """Yield what the AlertmanagerConfig needs to receive anything, and what it does not stop."""
    subjects = list(_subjects(wanted))
    without = sum("namespace" not in names for names in subjects)
    yield (
        f"--alertmanager-config: {without} of {len(subjects)} alerts have no label namespace, so it works"
        f" only with spec.{STRATEGY}.type: None in the Alertmanager object (alertmanagerSpec of kube-prometheus-stack);"
        " the default OnNamespace hides those alerts from it. The cluster's own routes still get every alert"
    )
    if wanted.routes == "none":
        yield "--alertmanager-config none: its receivers notify nobody; choose webhook, slack, pagerduty or email"


def _subjects(wanted: KubernetesOptions) -> Iterator[Any]:
    settings, objectives = wanted.rules.settings, wanted.rules.objectives
    recorded = {each.record: each for each in registry.recordings(settings, objectives)}
    return (routing.subject(alert, recorded) for alert in registry.alerts(settings, objectives))


def secret_keys(wanted: KubernetesOptions) -> list[str]:
    """Return the keys that the secret must have."""
    return [PurePath(path).name for path in routing.secret_files(wanted.routes or "none")]


def secret_content(wanted: KubernetesOptions) -> str:
    """Return what each key of the secret holds."""
    return next(iter(routing.secret_files(wanted.routes or "none").values()), "")


def _route(route: dict[str, Any]) -> Object:
    """Return a route in the operator's words. Its children are raw JSON there, with the same words."""
    made = {_camel(key): value for key, value in route.items() if key not in ("matchers", "routes")}
    if "matchers" in route:
        made["matchers"] = _matchers(route["matchers"])
    if "routes" in route:
        made["routes"] = [_route(each) for each in route["routes"]]
    return made


def _inhibition(rule: dict[str, Any]) -> Object:
    return {
        "sourceMatch": _matchers(rule["source_matchers"]),
        "targetMatch": _matchers(rule["target_matchers"]),
        "equal": rule["equal"],
    }


def _matchers(texts: list[str]) -> list[dict[str, str]]:
    """Raises ValueError for text that is no matcher."""
    found = [_MATCHER.fullmatch(text) for text in texts]
    if wrong := [text for text, match in zip(texts, found, strict=True) if match is None]:
        raise ValueError(f'{wrong[0]!r} is no matcher; write it like severity="critical"')
    return [match.groupdict() for match in found if match]


def _receiver(receiver: dict[str, Any], secret: str) -> Object:
    return {
        _camel(key): value if key == "name" else [_integration(each, secret) for each in value]
        for key, value in receiver.items()
    }


def _integration(settings: dict[str, Any], secret: str) -> Object:
    made: Object = {}
    for key, value in settings.items():
        if key in _SECRETS:
            made[_SECRETS[key]] = {"name": secret, "key": PurePath(value).name}
        elif key in _PAIRS:
            made[key] = [{"key": name, "value": text} for name, text in value.items()]
        elif key == "links":  # PagerDuty's
            made["pagerDutyLinkConfigs"] = [{"href": link["href"], "alt": link["text"]} for link in value]
        else:
            made[_camel(key)] = value
    return made


def _camel(words: str) -> str:
    """pagerduty_configs -> pagerdutyConfigs."""
    first, *rest = words.split("_")
    return first + "".join(word.capitalize() for word in rest)
