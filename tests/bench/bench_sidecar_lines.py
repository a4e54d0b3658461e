"""What `make bench-sidecar` lets the readers read: lines of the request log, as our gateway writes them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from exporters.requests.record import RequestRecord, timestamp, to_line

_NUMBER, _TS = b'"request_id":"%08x', b'"ts":"%b"'
_MADE_AT_S = 1_795_000_000.0


@dataclass(frozen=True)
class Lines:
    """`count` lines of these teams and models in turn. Made once: writing a record takes longer than reading it, so
    more lines are the same ones with other request ids and another time."""

    teams: int
    models: int = 1
    count: int = 10_000

    def text(self, number: int, at_s: float = _MADE_AT_S) -> bytes:
        """The lines with ids that no other number has, of requests that ended at that unix second."""
        text = _made(self).replace(_NUMBER % 0, _NUMBER % number)
        return text.replace(_TS % timestamp(_MADE_AT_S).encode(), _TS % timestamp(at_s).encode())


@cache
def _made(lines: Lines) -> bytes:
    rng = random.Random(6)
    return b"".join(
        to_line(record(rng, at % lines.teams, at // lines.teams % lines.models)) for at in range(lines.count)
    )


def record(rng: random.Random, team: int, model: int) -> RequestRecord:
    """One of the usual kinds: 97 of 100 are answered."""
    outcome = rng.choices(("ok", "client_abort", "rejected", "upstream_error"), (97, 1, 1, 1))[0]
    served, done = outcome != "rejected", outcome == "ok"
    prompt, completion, cached = rng.randrange(50, 4000), rng.randrange(2, 900), rng.choice((0, 256, 512))
    queue_ms, engine_ms, tpot_ms = rng.expovariate(0.1), rng.lognormvariate(4.5, 0.8), rng.lognormvariate(2.8, 0.3)
    ttft_ms = queue_ms + engine_ms + rng.uniform(0.2, 2)
    return RequestRecord(
        request_id=f"00000000{rng.getrandbits(96):024x}",
        ts=timestamp(_MADE_AT_S),
        trace_id=f"{rng.getrandbits(128) | 1:032x}",
        span_id=f"{rng.getrandbits(64) | 1:016x}",
        team=f"team-{team:03d}",
        priority="interactive",
        model=f"llama-3.1-8b-{model:02d}",
        route="/v1/chat/completions",
        upstream=rng.choice(("engine-0", "engine-1")) if served else None,
        engine_version="0.32.0" if served else None,
        attempt=1,
        stream=True,
        prompt_tokens=prompt if done else None,
        cached_tokens=min(prompt, cached) if done else None,
        completion_tokens=completion if done else None,
        cache_hit=cached > 0 if done else None,
        queue_ms=round(queue_ms, 3),
        ttft_ms=round(ttft_ms, 3) if done else None,
        tpot_ms=round(tpot_ms, 3) if done else None,
        e2e_ms=round(ttft_ms + tpot_ms * completion, 3) if served else round(queue_ms, 3),
        engine_queue_ms=round(engine_ms * 0.1, 3) if done else None,
        engine_ttft_ms=round(engine_ms * 0.9, 3) if done else None,
        status={"ok": 200, "client_abort": 499, "rejected": 429, "upstream_error": 502}[outcome],
        finish_reason=rng.choice(("stop", "length"))
        if done
        else {"client_abort": "abort", "rejected": "rejected"}.get(outcome, "error"),
        outcome=outcome,
        reason=None
        if done
        else {"client_abort": "client_gone", "rejected": "team_limit"}.get(outcome, "connect_failed"),
        est_prompt_tokens=prompt,
    )
