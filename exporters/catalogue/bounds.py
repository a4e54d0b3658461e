"""Histogram bounds in seconds: vLLM's own, so that our quantiles and the engine's can be laid side by side.

Where vLLM's first bound is too coarse for a fast engine (0.3 s for request times, 10 ms between tokens) finer ones are put in front; every
bound of vLLM's stays. Source: the 0.32 pages in tests/golden, compared by a test; `--custom-histogram-buckets` can change the engine's."""

TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

OUR_TPOT_S = (0.001, 0.0025, 0.005, *INTER_TOKEN_S)
OUR_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *REQUEST_S)
