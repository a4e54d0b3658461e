"""Reader of Prometheus' protobuf format on the protobuf library: the reference for what we write by hand.

Source: prometheus/client_model, io/prometheus/client/metrics.proto."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "io.prometheus.client"
# Message -> field -> number and type; "[]" marks a repeated field, "[packed]" a packed one.
_SCHEMA = {
    "LabelPair": {"name": (1, "string"), "value": (2, "string")},
    "Timestamp": {"seconds": (1, "int64"), "nanos": (2, "int32")},
    "Exemplar": {"label": (1, "LabelPair[]"), "value": (2, "double"), "timestamp": (3, "Timestamp")},
    "Gauge": {"value": (1, "double")},
    "Counter": {"value": (1, "double")},
    "Bucket": {"cumulative_count": (1, "uint64"), "upper_bound": (2, "double"), "exemplar": (3, "Exemplar")},
    "BucketSpan": {"offset": (1, "sint32"), "length": (2, "uint32")},
    "Histogram": {
        "sample_count": (1, "uint64"), "sample_sum": (2, "double"), "bucket": (3, "Bucket[]"), "schema": (5, "sint32"),
        "zero_threshold": (6, "double"), "zero_count": (7, "uint64"), "positive_span": (12, "BucketSpan[]"),
        "positive_delta": (13, "sint64[packed]"),
    },
    "Metric": {"label": (1, "LabelPair[]"), "gauge": (2, "Gauge"), "counter": (3, "Counter"),
        "histogram": (7, "Histogram")},
    "MetricFamily": {"name": (1, "string"), "help": (2, "string"), "type": (3, "int32"), "metric": (4, "Metric[]")},
}  # fmt: skip


def _message_class(name: str) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="metrics.proto", package=_PACKAGE, syntax="proto2")
    for message, fields in _SCHEMA.items():
        descriptor = file.message_type.add(name=message)
        for field_name, (number, kind) in fields.items():
            kind, _, suffix = kind.partition("[")
            field = descriptor.field.add(
                name=field_name, number=number, label=_Field.LABEL_REPEATED if suffix else _Field.LABEL_OPTIONAL
            )
            if kind in _SCHEMA:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = getattr(_Field, f"TYPE_{kind.upper()}")
            if suffix == "packed]":
                field.options.packed = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


_MetricFamily = _message_class("MetricFamily")


def families(page: bytes) -> dict[str, Any]:
    """Return the families of a page by name. Raises ValueError for a field that the schema does not have."""
    found = {}
    while page:
        size = shift = used = 0
        while True:
            byte = page[used]
            size, shift, used = size | (byte & 127) << shift, shift + 7, used + 1
            if byte < 128:
                break
        family = _MetricFamily.FromString(page[used : used + size])
        whole = family.SerializeToString()
        family.DiscardUnknownFields()
        if family.SerializeToString() != whole:
            raise ValueError(f"{family.name}: a field that the schema does not have")
        found[family.name] = family
        page = page[used + size :]
    return found


def buckets(histogram: Any) -> dict[int, int]:
    """Return the positive native buckets of a histogram by their index."""
    found: dict[int, int] = {}
    deltas, end, count = iter(histogram.positive_delta), 0, 0
    for span in histogram.positive_span:
        start, end = end + span.offset, end + span.offset + span.length
        for index in range(start, end):
            count += next(deltas)
            found[index] = count
    return found


def samples(page: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the values of a page by name and labels, histograms with their classic series, as the text format has
    them.

    Raises ValueError for a native histogram whose buckets do not add up to its count: Prometheus refuses the page."""
    found = {}
    for name, family in families(page).items():
        for metric in family.metric:
            labels = frozenset((label.name, label.value) for label in metric.label)
            if not metric.HasField("histogram"):
                found[name, labels] = metric.counter.value if metric.HasField("counter") else metric.gauge.value
                continue
            histogram = metric.histogram
            found |= {(f"{name}_count", labels): histogram.sample_count, (f"{name}_sum", labels): histogram.sample_sum}
            found |= {
                (f"{name}_bucket", labels | {("le", str(float(one.upper_bound)))}): one.cumulative_count
                for one in histogram.bucket
            }
            if histogram.positive_span and histogram.sample_count != histogram.zero_count + sum(
                buckets(histogram).values()
            ):
                raise ValueError(f"{name}: {histogram.sample_count} observations are not those of the native buckets")
    return found
