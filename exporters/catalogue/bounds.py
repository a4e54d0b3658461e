"""Histogram bounds in seconds: vLLM's own, so that sidecar and engine quantiles are comparable.

Finer bounds are added where vLLM's first bound is too coarse for a fast engine (0.3 s for request times, 10 ms
between tokens); every vLLM bound stays. Source: the 0.32 scrapes in tests/golden, compared by a test.
`--custom-histogram-buckets` changes the engine's bounds; ENGINE_LADDER is the value we recommend for it."""

from __future__ import annotations

from collections.abc import Sequence

TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_S = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip

OUR_TPOT_S = (0.001, 0.0025, 0.005, *INTER_TOKEN_S)
OUR_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *REQUEST_S)

# Of families by adapter and by route, which have a few buckets only; each is a bound of vLLM's.
GROUPED_TTFT_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0)
GROUPED_REQUEST_S = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 240.0)


_NEAR_RATIO = 1.25  # ratio; a bound closer than this to a default one adds no information


def _finer(default: Sequence[float], low: float, high: float) -> tuple[float, ...]:
    """Return default bounds with finer steps from low to high, at most a factor of 1.5 apart.

    Every default bound stays, and no added bound is close to one."""
    steps = [mantissa * 10**power for power in range(-4, 3) for mantissa in (1, 1.5, 2, 3, 4, 5, 7)]
    added = [
        round(step, 6)
        for step in steps
        if low <= step <= high and all(not 1 / _NEAR_RATIO < step / bound < _NEAR_RATIO for bound in default)
    ]
    return tuple(sorted((*default, *added)))


# The recommended bounds, by family of --custom-histogram-buckets. SLO bounds are default bounds, so they are included.
ENGINE_LADDER: dict[str, tuple[float, ...]] = {
    "time_to_first_token": _finer(TTFT_S, 0.001, 60), "inter_token_latency": _finer(INTER_TOKEN_S, 0.001, 10),
    "request_latency": _finer(REQUEST_S, 0.001, 120),
}  # fmt: skip
# first vLLM release that accepts it: vllm-project/vllm#48867, merged at the end of September 2026
ENGINE_LADDER_SINCE = "0.32"


def format_bound(mark: str, seconds: float) -> str:
    """Format an open-ended bound for terminals: `< 300 ms`, `> 7,680 s`. `mark` is < or >."""
    return f"{mark} {1000 * seconds:g} ms" if seconds < 1 else f"{mark} {seconds:,.12g} s"


def engine_arguments() -> tuple[str, ...]:
    """Return ENGINE_LADDER as arguments of `vllm serve`.

    They hold no brace or quote, so no shell or template needs escapes."""
    return tuple(
        f"--custom-histogram-buckets.{family}+={','.join(f'{bound:g}' for bound in ladder)}"
        for family, ladder in ENGINE_LADDER.items()
    )
