"""Histogram bounds in seconds: vLLM's own, so that our quantiles and the engine's can be laid side by side.

Where vLLM's first bound is too coarse for a fast engine (0.3 s for request times, 10 ms between tokens) finer ones are
put in front; every bound of vLLM's stays. Source: the 0.32 pages in tests/golden, compared by a test;
`--custom-histogram-buckets` can change the engine's, and ENGINE_LADDER is what we recommend for it."""

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


_BESIDE = 1.25  # a bound so near to a default one shows nothing that this does not


def _finer(default: Sequence[float], low: float, high: float) -> tuple[float, ...]:
    """A ladder with finer steps from low to high: half as much again at most. Every default bound stays, and none
    stands close beside one."""
    steps = [mantissa * 10**power for power in range(-4, 3) for mantissa in (1, 1.5, 2, 3, 4, 5, 7)]
    added = [
        round(step, 6)
        for step in steps
        if low <= step <= high and all(not 1 / _BESIDE < step / bound < _BESIDE for bound in default)
    ]
    return tuple(sorted((*default, *added)))


# The recommended ladder, by the families of --custom-histogram-buckets. Bounds of objectives are default bounds, so
# that they are on it.
ENGINE_LADDER: dict[str, tuple[float, ...]] = {
    "time_to_first_token": _finer(TTFT_S, 0.001, 60), "inter_token_latency": _finer(INTER_TOKEN_S, 0.001, 10),
    "request_latency": _finer(REQUEST_S, 0.001, 120),
}  # fmt: skip
# first release of ours whose engine takes it: vllm-project/vllm#48867, merged at the end of September 2026
ENGINE_LADDER_SINCE = "0.32"


def told(mark: str, seconds: float) -> str:
    """A bound that a value lies beyond, as terminals write it: `< 300 ms`, `> 7,680 s`. mark: < or >."""
    return f"{mark} {1000 * seconds:g} ms" if seconds < 1 else f"{mark} {seconds:,.12g} s"


def engine_arguments() -> tuple[str, ...]:
    """The ladder as arguments of `vllm serve`, without a brace or a quote, so that no shell and no template needs to be
    escaped."""
    return tuple(
        f"--custom-histogram-buckets.{family}+={','.join(f'{bound:g}' for bound in ladder)}"
        for family, ladder in ENGINE_LADDER.items()
    )
