"""Baseline of golden checks: what one model computed for each prompt, as a JSON file.

Invariant: the file is replaced as a whole, or not at all, and holds no key. It holds the prompts as text, which are
the operator's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from exporters.text import write_atomically
from stack.golden.comparison import NoiseLimits, TokenNoise

VERSION = 1


class GoldenError(ValueError):
    """A check or record that cannot be made; the message has cause and remedy. tokens: used before it failed."""

    tokens = 0


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of an engine as it reports it; None where it does not. model: the served name. root: origin of the
    model.

    dtype, quantization: only in vLLM's development mode. logit_bits: see comparison.logit_bits."""

    model: str
    root: str | None = None
    max_model_len: int | None = None
    version: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    logit_bits: int | None = None


class GoldenPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. text_ids: tokens of the text as the engine made them, empty where it does not report them. ids: those
    whose log-probabilities are compared: the beginning of the text, or the message as the chat route renders it. alone:
    log-probabilities of a run without other requests, from the second token on. best: most likely token at each place,
    empty where the engine does not report it."""

    name: str
    text: str
    text_ids: tuple[int, ...] = ()
    ids: tuple[int, ...]
    alone: tuple[float, ...]
    best: tuple[int, ...] = ()
    noise: TokenNoise


class GreedyText(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy completion of a prompt. tokens: as `token_id:N`. gaps: by how much the chosen token was more likely than
    the next one, in nats; 0 where the engine does not say."""

    prompt: str
    tokens: tuple[str, ...]
    gaps: tuple[float, ...]


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded answers of one engine. route: /v1/completions, or /v1/chat/completions, whose prompts are messages.

    conversation_ids: tokens that the chat template made of `conversation`; None without a chat route.
    top_logprobs: k of prompt_logprobs, 1 or 0. tokens: of one run, prompts and completions."""

    version: int = VERSION
    recorded: str
    route: str
    engine: EngineIdentity
    prompts: tuple[GoldenPrompt, ...]
    greedy: tuple[GreedyText, ...]
    greedy_varies: bool = False
    conversation: tuple[Mapping[str, str], ...] = ()
    conversation_ids: tuple[int, ...] | None = None
    template_options: Mapping[str, Any] = {}
    top_logprobs: int = 1
    limits: NoiseLimits
    levels: tuple[int, ...]
    runs: int
    tokens: int

    @property
    def noise(self) -> list[TokenNoise]:
        return [prompt.noise for prompt in self.prompts]


def load(path: Path) -> Baseline:
    """Read a baseline. Raises GoldenError."""
    try:
        baseline = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except FileNotFoundError:
        raise GoldenError(
            f"{path} does not exist; `vllm-watch golden record URL --baseline {path}` records one"
        ) from None
    except OSError as error:
        raise GoldenError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise GoldenError(f"{path} is no baseline of golden prompts ({error}); record one anew") from None
    if baseline.version != VERSION:
        raise GoldenError(f"{path} is of another release (version {baseline.version}); record it anew")
    if flaw := _flaw(baseline):
        raise GoldenError(f"{path} is no baseline of golden prompts ({flaw}); record one anew")
    return baseline


def _flaw(baseline: Baseline) -> str | None:
    """Return what the types of a baseline do not show."""
    if not baseline.prompts:
        return "it has no prompts"
    for prompt in baseline.prompts:
        lengths = {len(prompt.ids) - 1, len(prompt.alone), len(prompt.noise.mean), len(prompt.noise.sd)}
        if len(lengths) > 1 or len(prompt.ids) < 2 or prompt.noise.distinct < 1:
            return f"prompt {prompt.name!r} has lists of different lengths"
    known = {prompt.name for prompt in baseline.prompts}
    if any(one.prompt not in known or len(one.gaps) != len(one.tokens) for one in baseline.greedy):
        return "a greedy completion belongs to no prompt"
    return None


def save(path: Path, baseline: Baseline, *, replace: bool) -> None:
    """Write a baseline. Raises GoldenError for a file that exists, without `replace`, or cannot be written."""
    try:
        write_atomically(path, msgspec.json.encode(baseline) + b"\n", once=not replace)
    except FileExistsError:
        raise GoldenError(f"{path} exists; --replace records over it, or choose another name") from None
    except OSError as error:
        raise GoldenError(f"{path} cannot be written: {error.strerror}") from None
