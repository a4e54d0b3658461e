"""Capture of log-probabilities on a GPU, as in h100-bfloat16.json.gz: python capture.py TARGET [--hidden N --layers N].

Needs torch and transformers, no vLLM. The model is a Llama of random weights whose matrices have the sizes of an 8 B
model, so that the libraries choose the kernels that they choose there. One step computes a prompt and what an engine
would compute beside it: tokens of decodes and, in three of ten, a piece of another prefill."""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

# The environment of the tests has neither.
import torch  # type: ignore[import-not-found,unused-ignore]
from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found,unused-ignore]

SIZES = (1, 2, 4, 8, 16, 32)
RECORD_RUNS, CHECKS, CHECK_RUNS = 24, 12, 4
PROMPTS, LONGEST, VOCABULARY, MOST_GAPS = 8, 128, 49_152, 120
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
rng = random.Random(1)

Scored = tuple[list[float], list[float]]  # log-probabilities of a prompt, and gaps to the most likely tokens


@torch.inference_mode()
def score(model: Any, ids: list[int], others: list[list[int]]) -> Scored:
    """Score a prompt in one step with other sequences, packed as engines pack them."""
    packed = [ids, *others]
    owner = torch.tensor([number for number, each in enumerate(packed) for _ in each], device=DEVICE)
    place = torch.arange(len(owner), device=DEVICE)
    visible = (owner[:, None] == owner[None]) & (place[:, None] >= place[None])
    mask = visible[None, None]
    if model.config._attn_implementation == "eager":
        mask = torch.zeros_like(mask, dtype=model.dtype).masked_fill_(~mask, torch.finfo(model.dtype).min)
    hidden = model.model(
        input_ids=torch.tensor([[token for each in packed for token in each]], device=DEVICE),
        position_ids=torch.tensor([[at for each in packed for at in range(len(each))]], device=DEVICE),
        attention_mask=mask,
        use_cache=False,
    ).last_hidden_state[0, : len(ids) - 1]
    scores = torch.log_softmax(model.lm_head(hidden).float(), -1)
    own = scores.gather(1, torch.tensor(ids[1:], device=DEVICE)[:, None])[:, 0]
    return own.tolist(), [gap for gap in (scores.max(1).values - own).tolist() if 0 < gap < 8]


def company(size: int) -> list[list[int]]:
    """Return what is computed beside a prompt when `size` requests run."""
    found = [[rng.randrange(100, VOCABULARY)] for _ in range(size - 1)]
    if found and rng.random() < 0.3:
        found[0] = [rng.randrange(100, VOCABULARY) for _ in range(rng.randrange(16, 400))]
    return found


def new_model(hidden: int, layers: int, dtype: Any = torch.bfloat16) -> Any:
    torch.manual_seed(5)
    heads = max(1, hidden // 128)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), initializer_range=0.03,
        tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model.to(dtype).eval()


def changes(model: Any) -> dict[str, tuple[Any, Callable[[], object]]]:
    """Return damages by name: the weight that each changes, and the change."""
    layer = model.model.layers[len(model.model.layers) // 2]
    down, query = layer.mlp.down_proj.weight, layer.self_attn.q_proj.weight
    size = query.shape[0] // model.config.num_attention_heads
    return {
        "flip-largest": (down, lambda: down.view(-1)[int(down.abs().argmax())].mul_(-1)),
        "row": (down, lambda: down[7].mul_(-1)),
        "layer-0.9": (down, lambda: down.mul_(0.9)),
        "heads": (query, lambda: query[: 2 * size].copy_(query[: 2 * size].roll(size, 0))),
    }


def round_weights(model: Any, most: int) -> None:
    """Round each row of each matrix to 2 x most + 1 levels."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
            step = weight.abs().amax(1, keepdim=True).float() / most
            weight.copy_(((weight.float() / step).round() * step).to(weight.dtype))


def variants(hidden: int, layers: int) -> Iterator[tuple[str, Any]]:
    """Yield models that compute otherwise: other kernels, damage, another dtype, rounded weights."""
    model = new_model(hidden, layers)
    if DEVICE == "cuda":
        torch.backends.cuda.preferred_blas_library("cublaslt")
        yield "blas-cublaslt", model
        torch.backends.cuda.preferred_blas_library("default")
    model.config._attn_implementation = "eager"
    yield "attention-eager", model
    model.config._attn_implementation = "sdpa"
    for name, (weight, change) in changes(model).items():
        kept = weight.detach().clone()
        with torch.no_grad():
            change()
        yield name, model
        with torch.no_grad():
            weight.copy_(kept)
    yield "float16", model.to(torch.float16)
    yield "float32", new_model(hidden, layers, torch.float32)
    for name, most in (("int8", 127), ("int4", 7)):
        rounded = new_model(hidden, layers)
        with torch.no_grad():
            round_weights(rounded, most)
        yield name, rounded


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    asked = parser.parse_args()
    prompts = [[rng.randrange(100, VOCABULARY) for _ in range(rng.randrange(40, LONGEST))] for _ in range(PROMPTS)]

    def run(model: Any, size: int) -> list[Scored]:
        return [score(model, ids, company(size)) for ids in prompts]

    def own(scored: list[Scored]) -> list[list[float]]:
        return [[round(value, 5) for value in values] for values, _ in scored]

    def gaps(scored: list[Scored]) -> list[float]:
        return [round(gap, 7) for _, found in scored for gap in found[:30]][:MOST_GAPS]

    model = new_model(asked.hidden, asked.layers)
    levels = {size: [own(run(model, size)) for _ in range(RECORD_RUNS // len(SIZES))] for size in SIZES}
    captured: dict[str, Any] = {"levels": levels, "gaps": gaps(run(model, 1)), "checks": [], "variants": {}}
    for number in range(CHECKS):
        size = SIZES[number % len(SIZES)]
        captured["checks"].append({"size": size, "runs": [own(run(model, size)) for _ in range(CHECK_RUNS)]})
    del model
    for name, changed in variants(asked.hidden, asked.layers):
        alone, beside = run(changed, 1), run(changed, 8)
        captured["variants"][name] = {"runs": [own(alone), own(beside)], "gaps": gaps(alone)}
    with open(asked.target, "wb") as file:
        file.write(gzip.compress(json.dumps(captured, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
