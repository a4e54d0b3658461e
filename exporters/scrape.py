"""Response to a scrape in the format that the client prefers: protobuf, OpenMetrics or text.

Only protobuf carries native histograms, and Prometheus requests it only if it stores them; other clients get classic
buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import cast

from exporters import exposition, protobuf_exposition
from exporters.exposition import Sample

Block = exposition.Block | protobuf_exposition.Block


class Format(Enum):
    """Exposition format with its content type. With equal preference the first one here is used."""

    PROTOBUF = protobuf_exposition.CONTENT_TYPE
    OPENMETRICS = exposition.OPENMETRICS_TYPE
    TEXT = exposition.CONTENT_TYPE


def negotiate(accept: str) -> Format:
    """Return the format with the highest q of an Accept header; text if it names none of ours."""
    wanted = dict(_wanted(accept))
    return max(Format, key=lambda one: wanted.get(one, 0.0)) if any(wanted.values()) else Format.TEXT


def answer(
    samples: Iterable[Sample], accept: str, blocks: Callable[[Format], Iterable[Block]] = lambda _: ()
) -> tuple[bytes, str]:
    """Return the body and its content type. blocks: returns serialised samples in a format."""
    into = negotiate(accept)
    return page((block(samples, into), *blocks(into)), into), into.value


def block(samples: Iterable[Sample], into: Format) -> Block:
    """Serialise samples for one or more expositions."""
    if into is Format.PROTOBUF:
        return protobuf_exposition.block(samples)
    return exposition.block(samples, into is Format.OPENMETRICS)


def page(blocks: Iterable[Block], into: Format) -> bytes:
    """Return one exposition of several blocks in their format."""
    if into is Format.PROTOBUF:
        return protobuf_exposition.page(cast("Iterable[protobuf_exposition.Block]", blocks))
    return exposition.page(cast("Iterable[exposition.Block]", blocks), into is Format.OPENMETRICS).encode()


def _wanted(accept: str) -> Iterator[tuple[Format, float]]:
    """Yield our formats with their q, least preferred first."""
    found = []
    for part in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        settings = dict(piece.partition("=")[::2] for piece in parameters)
        try:
            q = float(settings.get("q", 1.0))
        except ValueError:
            q = 0.0
        q = q if 0.0 <= q <= 1.0 else 0.0  # a float may be written as nan or inf
        if kind == "application/vnd.google.protobuf":
            if settings.get("proto") == "io.prometheus.client.metricfamily" and settings.get("encoding") == "delimited":
                found.append((Format.PROTOBUF, q))
        elif kind == exposition.OPENMETRICS:
            found.append((Format.OPENMETRICS, q))
        elif kind in ("text/plain", "text/*", "*/*"):
            found.append((Format.TEXT, q))
    return iter(sorted(found, key=lambda one: one[1]))
