"""`make bench-vllm`: each back end of `vllm bench serve` that an engine here answers, directly and through the gateway.

A row agrees if both runs, of one seed, end with the same lengths of every prompt and output, and the log of the gateway
sums to what the tool reports. The tool asks /tokenize without a key, so the gateway takes those requests for a guest's.

Not here: openai-audio needs a speech model, the dataset `custom` needs pandas; no engine here has either."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from stack.lab import plan
from tests.support.engines import get, started
from tests.support.live_gateway import Gate, running
from tests.support.load_generator_pair import engine_parts, forked
from tests.support.ports import free_port
from tests.support.wait import eventually

GENERATION = """
vllm /v1/completions --dataset-name random --random-input-len 64 --random-output-len 16
openai /v1/completions --dataset-name random --random-input-len 300 --random-range-ratio 0.5 --request-rate 20
openai /v1/completions --dataset-name prefix_repetition --prefix-repetition-num-prefixes 4 --ignore-eos
openai /v1/completions --dataset-name sharegpt --dataset-path {sharegpt} --max-concurrency 1
openai /v1/completions --dataset-name sharegpt --dataset-path {sharegpt} --ignore-eos --request-rate 10 --burstiness 0.3
openai /v1/completions --dataset-name timed_trace --dataset-path {trace}
openai-chat /v1/chat/completions --dataset-name random --random-input-len 64 --random-output-len 16
openai-chat /v1/chat/completions --dataset-name sharegpt --dataset-path {sharegpt} --ignore-eos --max-concurrency 2
openai-chat /v1/chat/completions --dataset-name prefix_repetition --prefix-repetition-num-prefixes 4 --request-rate 10
openai-responses /v1/responses --dataset-name random --random-input-len 64 --random-output-len 16
openai-responses /v1/responses --dataset-name sharegpt --dataset-path {sharegpt} --request-rate 10
"""
EMBEDDING = """
openai-embeddings /v1/embeddings --dataset-name random --random-input-len 64
openai-embeddings /v1/embeddings --dataset-name random --random-input-len 32 --random-batch-size 4
openai-embeddings /v1/embeddings --dataset-name random --extra-body {{"encoding_format":"bytes"}}
openai-embeddings-chat /v1/embeddings --dataset-name random --random-input-len 64
openai-embeddings-clip /v1/embeddings --dataset-name random --random-input-len 64
openai-embeddings-vlm2vec /v1/embeddings --dataset-name random --random-input-len 64
infinity-embeddings /v1/embeddings --dataset-name random --random-input-len 64 --request-rate 20
infinity-embeddings-clip /v1/embeddings --dataset-name random --random-input-len 64
vllm-pooling /pooling --dataset-name random --random-input-len 64
vllm-pooling /pooling --dataset-name sharegpt --dataset-path {sharegpt} --max-concurrency 2
vllm-rerank /v1/rerank --dataset-name random-rerank --random-input-len 64 --random-batch-size 3
"""
RERANKING = """
vllm-rerank /rerank --dataset-name random-rerank --random-input-len 64 --random-batch-size 3
vllm-rerank /v2/rerank --dataset-name random-rerank --random-input-len 64 --no-reranker --random-batch-size 2
"""
# what each engine is started with; a classifier's file has no layer for classes
ENGINES = (
    (GENERATION, ""),
    (EMBEDDING, "--runner=pooling --convert=embed"),
    (RERANKING, '--runner=pooling --convert=classify --hf-overrides={"num_labels":1} --load-format=dummy'),
)
REQUESTS = 12
POLICY = {"teams": {"demo": {}, "guest": {}}, "upstreams": {"one": {"url": "{one}"}}}
COUNTED = ("completed", "total_input_tokens", "total_output_tokens")
LOGGED = ("prompt_tokens", "completion_tokens")
COMPARED = ("failed", "input_lens", "output_lens", "errors")


def datasets(folder: Path) -> dict[str, Path]:
    """Write prompts of several lengths in the formats of the tool."""
    numbers = range(REQUESTS)
    texts = [" ".join(["the cache of the server"] * (1 + n % 5)) for n in numbers]
    rows: dict[str, list[Any]] = {
        "trace": [
            {"timestamp": n / 50, "input_length": 40 + n, "output_length": 8, "hash_ids": [n, 1, 2, 3]} for n in numbers
        ],
        "sharegpt": [[{"conversations": [{"value": text}, {"value": text}]} for text in texts]],
    }
    files = {name: folder / f"{name}.jsonl" for name in rows}
    for name, lines in rows.items():
        files[name].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return files


def run(url: str, key: str, row: list[str], folder: Path) -> dict[str, Any]:
    """Run the tool; return what it wrote."""
    folder.mkdir(parents=True)
    programs = engine_parts()
    backend, endpoint, *options = row
    argv = [
        programs["engine"], "bench", "serve", "--backend", backend, "--endpoint", endpoint, "--base-url", url,
        "--model", plan.MODEL, "--tokenizer", programs["model"], *options, "--num-prompts", REQUESTS, "--seed", 7,
        "--temperature", 0, "--ready-check-timeout-sec", 0, "--disable-tqdm", "--save-result", "--save-detailed",
        "--result-dir", folder, "--result-filename", "result.json",
    ]  # fmt: skip
    printed = forked(argv, {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": key}, programs["engine"], folder)
    assert (folder / "result.json").exists(), printed
    assert "unavailable" not in printed, printed  # the alignment of prompts by /tokenize
    return dict(json.loads((folder / "result.json").read_text()))


def compare(gate: Gate, engine: str, line: str, files: dict[str, Path], folder: Path) -> bool:
    """Run a row both ways, print it, and return whether all agrees."""
    row, before = line.format(**files).split(), len(gate.lines())
    ways = [run(engine, "none", row, folder / "direct"), run(gate.url, gate.keys["demo"], row, folder / "through")]
    counts = [[way.get(name, 0) for name in COUNTED] for way in ways]
    records = eventually(lambda: len(found := gate.lines()[before:]) >= counts[1][0] and found, "the records")
    log = [len(records), *(sum(getattr(record, name) or 0 for record in records) for name in LOGGED)]
    agree = counts == [log, log] and all(ways[0].get(name) == ways[1].get(name) for name in COMPARED)
    print(f"| {line} | {counts[0]} | {counts[1]} | {log} | {agree} |", flush=True)
    return agree and not any(ways[1]["errors"])


def main() -> None:
    print("| options | directly: requests, tokens in, out | through | log | agree |\n|---|---|---|---|---|")
    agree = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files = datasets(folder)
        for number, (table, arguments) in enumerate(ENGINES):
            here = folder / str(number)
            here.mkdir()
            engine = started(here, engine_parts(), free_port(), min(os.sched_getaffinity(0)), *arguments.split())
            try:
                upstreams, ports = {"one": engine.up().spec.address}, (free_port(), free_port())
                with running("bench", here, POLICY, upstreams, ports, anonymous="guest") as gate:
                    eventually(lambda gate=gate: get(f"{gate.url}/-/ready") == "ready\n", "a ready gateway")
                    for line in table.strip().splitlines():
                        agree.append(compare(gate, upstreams["one"], line, files, here / str(len(agree))))
            finally:
                engine.end()
    print(f"{sum(agree)} of {len(agree)} agree")
    raise SystemExit(not all(agree))


if __name__ == "__main__":
    main()
