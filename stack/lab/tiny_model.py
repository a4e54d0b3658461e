"""Tiny Llama with random weights and its tokenizer, written locally.

Run by the engine's Python, which has torch and transformers; we have neither. The same seed writes the same files."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

CONTEXT_TOKENS = 32768
VOCABULARY = 2048  # eight words for each raw byte, so that what the model says is mostly letters
SPECIALS = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{%"
    " endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfklmnrstvz" for vowel in "aeio")
_WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "with",
    "as",
    "request",
    "token",
    "cache",
    "queue",
    "metric",
    "model",
    "server",
)


def corpus(rng: random.Random) -> list[str]:
    """Sentences of real and made-up words, for the tokenizer to learn from."""
    made_up = ["".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4))) for _ in range(1500)]
    return [" ".join(rng.choices(_WORDS, k=8) + rng.choices(made_up, k=8)) for _ in range(1500)]


def tokenizer(rng: random.Random) -> Any:
    """Byte-level BPE, so that any text goes in."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-not-found,unused-ignore]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found,unused-ignore]

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        corpus(rng),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=list(SPECIALS), initial_alphabet=sorted(alphabet), show_progress=False
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=SPECIALS[0], bos_token=SPECIALS[1], eos_token=SPECIALS[2]
    )
    fast.model_max_length = CONTEXT_TOKENS
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write(folder: Path) -> None:
    """Writes the model, its configuration and its tokenizer into `folder`."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer(random.Random(0))  # noqa: S311
    words.save_pretrained(folder)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=SPECIALS.index("<s>"),
        eos_token_id=SPECIALS.index("</s>"),
        pad_token_id=SPECIALS.index("<pad>"),
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(shape).save_pretrained(folder, safe_serialization=True)
    # transformers 5 writes a class name that releases before it cannot load.
    settings = folder / "tokenizer_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=1)
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
