"""Print the request log of a simulated day: one model, random arrivals, few at night and ten times as many at noon.

Uses the standard library alone, so that a documentation page can run it."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

START_S = datetime(2026, 11, 23, tzinfo=UTC).timestamp()
DAY_S = 86400.0
LEAST_PER_S, MOST_PER_S = 0.3, 3.0
TTFT_S, TPOT_S = 0.4, 0.025


def rate_per_s(at_s: float) -> float:
    """Return the arrivals a second, `at_s` seconds after midnight: highest at noon."""
    share = math.sin(math.pi * at_s / DAY_S) ** 4
    return LEAST_PER_S + (MOST_PER_S - LEAST_PER_S) * share


def records(seed: int = 1) -> Iterator[dict[str, object]]:
    """Yield the records of the day, by arrival."""
    draw = random.Random(seed)
    at_s, number = 0.0, 0
    while True:
        at_s += draw.expovariate(MOST_PER_S)
        if at_s >= DAY_S:
            return
        if draw.random() > rate_per_s(at_s) / MOST_PER_S:  # thinning
            continue
        number += 1
        prompt, output = (min(4000, max(1, round(draw.lognormvariate(math.log(p50), 0.6)))) for p50 in (900, 250))
        time_s = TTFT_S + output * TPOT_S
        ended = datetime.fromtimestamp(START_S + at_s + time_s, UTC).isoformat(timespec="milliseconds")
        yield {
            "request_id": f"r{number}", "ts": ended, "model": "chat", "stream": True, "outcome": "ok",
            "prompt_tokens": prompt, "completion_tokens": output, "queue_ms": 0.0, "ttft_ms": TTFT_S * 1000,
            "tpot_ms": TPOT_S * 1000, "e2e_ms": round(time_s * 1000, 3),
        }  # fmt: skip


if __name__ == "__main__":
    sys.stdout.writelines(json.dumps(record, separators=(",", ":")) + "\n" for record in records())
