"""The few series that Prometheus itself makes and our rules and boards ask for."""

from exporters.catalogue.metric import Across, Kind, Metric, Unit

UP = Metric("up", Kind.GAUGE, Unit.FLAG, "1 when the last scrape of a target succeeded.", labels=("instance", "job"), across=Across.MIN)
ALERTS = Metric("ALERTS", Kind.GAUGE, Unit.FLAG, "1 for every alert that is pending or firing.", labels=("alertname", "alertstate", "severity"))

PROMETHEUS = (UP, ALERTS)
