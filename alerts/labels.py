"""Labels that name the subject of an alert: an engine, a model, a GPU. A label that a deployment lacks is left out."""

from __future__ import annotations

PLACE = ("cluster", "namespace")
JOB = (*PLACE, "job")
TARGET = (*JOB, "instance")
ENGINE = (*TARGET, "model_name")  # one model on one engine
# all engines of a model; these are the only labels that series from the request log share with those of engines
MODEL = ("cluster", "model_name")
TEAM = ("cluster", "team")
GPU = (*TARGET, "uuid")

# A target and an engine with their Kubernetes pod, for alerts: kubectl commands in runbooks need it, and outside
# Kubernetes it is left out. Each series has one pod, so grouping by it divides nothing. Not for GPUs: dcgm-exporter
# puts there the pod that uses the GPU, which changes while the GPU stays.
TARGET_POD = (*TARGET, "pod")
ENGINE_POD = (*ENGINE, "pod")


def by(labels: tuple[str, ...]) -> str:
    return f"by ({', '.join(labels)})"


def on(labels: tuple[str, ...]) -> str:
    return f"on ({', '.join(labels)})"
