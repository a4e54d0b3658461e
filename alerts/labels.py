"""What an alert is about: the labels that name an engine, a model, a card. Labels that a deployment does not have
simply do not appear."""

from __future__ import annotations

PLACE = ("cluster", "namespace")
JOB = (*PLACE, "job")
TARGET = (*JOB, "instance")
ENGINE = (*TARGET, "model_name")  # one model on one engine
# all its engines; the request log, which comes from elsewhere, has no other labels in common with them
MODEL = ("cluster", "model_name")
TEAM = ("cluster", "team")
CARD = (*TARGET, "uuid")


def by(labels: tuple[str, ...]) -> str:
    return f"by ({', '.join(labels)})"


def on(labels: tuple[str, ...]) -> str:
    return f"on ({', '.join(labels)})"
