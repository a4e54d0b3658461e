"""Prompts of golden checks: a default set, and files with others.

The default set covers prose, languages, digits, code and rare words, because damage of a token's weights shows only
where the token occurs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stack import config

# One request with prompt_logprobs needs tokens x vocabulary x 6 bytes that the engine's start-up profile does not know:
# 117 MB at 152,000 words. Longer prompts have ended engines whose memory was filled to the brim.
LONGEST_TOKENS = 128


class TextPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt, sent as text of a completion."""

    name: str
    text: str


class PromptSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """prompts: at least one, of at most 128 tokens each. conversation: messages for the chat route, whose template they
    test. template_options: chat_template_kwargs; a template with today's date renders another text every day, so pin
    it. cut: compare the first 128 tokens of a longer prompt, instead of refusing it."""

    prompts: tuple[TextPrompt, ...]
    conversation: tuple[Mapping[str, str], ...] = (
        {"role": "user", "content": "What does a cache keep?"},
        {"role": "assistant", "content": "Results that were computed before."},
        {"role": "user", "content": "And when does it forget them?"},
    )
    template_options: Mapping[str, Any] = msgspec.field(default_factory=lambda: {"date_string": "01 Jan 2026"})
    cut: bool = False

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("prompts: at least one is needed")
        names = [prompt.name for prompt in self.prompts]
        if double := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"prompts: {double!r} is the name of two; give each its own")
        if empty := next((prompt.name for prompt in self.prompts if len(prompt.text) < 2), None):
            raise ValueError(f"prompts: the text of {empty!r} needs at least two characters")


def load(path: Path | None) -> PromptSet:
    """Return the prompts of a file, or the default ones. Raises BadConfig."""
    return DEFAULT_PROMPTS if path is None else config.load(path, PromptSet)


_TEXTS = {
    "prose": (
        "The lighthouse keeper wrote down the weather every morning, although nobody had asked for it in years. When"
        " the storm of that winter took the bridge, his notes were the only record of how high the water had come, and"
        " the engineers who built the new one drew their plans around his pencil marks."
    ),
    "science": (
        "Photosynthesis converts light into chemical energy. In the light-dependent reactions, water is split, oxygen"
        " is released, and ATP and NADPH are formed; in the Calvin cycle these carriers reduce carbon dioxide to"
        " sugars. The rate is limited by light, temperature, or the concentration of carbon dioxide."
    ),
    "law": (
        "Notwithstanding the foregoing, neither party shall be liable for any failure to perform its obligations where"
        " such failure results from circumstances beyond its reasonable control, provided that the affected party gives"
        " prompt written notice and resumes performance as soon as practicable."
    ),
    "dialogue": (
        '"You said seven." "I said about seven." "The train left at five past." "Then it was early, or we were late,'
        ' and either way the next one stops at every village between here and the coast." She laughed and sat down on'
        " her suitcase."
    ),
    "python": (
        "def merge(left, right):\n    result, i, j = [], 0, 0\n    while i < len(left) and j < len(right):\n"
        "        if left[i] <= right[j]:\n            result.append(left[i]); i += 1\n        else:\n"
        "            result.append(right[j]); j += 1\n    return result + left[i:] + right[j:]\n"
    ),
    "sql": (
        "SELECT c.name, SUM(o.total) AS spent FROM customers AS c JOIN orders AS o ON o.customer_id = c.id WHERE"
        " o.created_at >= '2025-01-01' AND o.status <> 'cancelled' GROUP BY c.name HAVING SUM(o.total) > 1000 ORDER BY"
        " spent DESC LIMIT 10;"
    ),
    "json": (
        '{"id": 48213, "name": "sensor-7", "active": true, "limits": {"low": -12.5, "high": 81.0}, "tags": ["roof",'
        ' "north", null], "readings": [{"t": 1700000000, "v": 21.4}, {"t": 1700000060, "v": 21.6}, {"t": 1700000120,'
        ' "v": 21.9}]}'
    ),
    "arithmetic": (
        "17 + 25 = 42. 9 * 8 = 72. 144 / 12 = 12. 2 ** 10 = 1024. The sum of the first hundred whole numbers is 5050,"
        " since 100 * 101 / 2 = 5050. If x + 3 = 11, then x = 8. A third of 270 is 90, and 15 % of 80 is 12."
    ),
    "digits": (
        "3.14159265358979323846264338327950288419716939937510 2.71828182845904523536028747135266249775724709369995"
        " +49 30 901820 192.168.10.254 2026-11-26T08:15:30Z 0x7fff5fbff8a0 4111-1111-1111-1111"
    ),
    "german": (
        "Der Zug hatte Verspätung, weil ein Baum auf die Oberleitung gestürzt war. Wir warteten fast zwei Stunden am"
        " Bahnsteig, tranken lauwarmen Kaffee aus Pappbechern und überlegten, ob wir nicht doch mit dem Bus hätten"
        " fahren sollen."
    ),
    "french": (
        "Après la pluie, les pavés luisaient sous les réverbères et l'odeur du pain chaud sortait déjà des caves. Le"
        " boulanger, comme chaque nuit, sifflait l'air d'une chanson que sa grand-mère lui avait apprise."
    ),
    "spanish": (
        "El río bajaba crecido y nadie quiso cruzarlo aquella tarde. ¿Quién habría imaginado que el puente de madera,"
        " tan viejo como el pueblo, aguantaría otra primavera? Al amanecer seguía allí, torcido pero entero."
    ),
    "chinese": "春天来了。河边的柳树长出了新叶。孩子们放学以后在草地上放风筝。老人坐在长椅上下棋。",
    "russian": (
        "Зимой в деревне тихо: снег лежит до самых окон, дым из труб поднимается прямо вверх, и слышно, как трещит"
        " лёд."
    ),
    "names": (
        "Nguyen Thi Minh Khai, Oluwaseun Adebayo, Siobhan O'Sullivan, Jean-Baptiste Grenouille, Aleksandra"
        " Wojciechowska, Xochitl Quetzalcoatl, Llanfairpwllgwyngyll, Ouagadougou, Reykjavik, Antananarivo, Tegucigalpa"
    ),
    "rare": (
        "The sesquipedalian apothecary's zeugma, a paraprosdokian wrapped in periphrasis, discombobulated the"
        " quixotic sommelier; phlogiston, ytterbium and praseodymium featured in his crepuscular soliloquy on"
        " syzygy and onomatopoeia."
    ),
}  # fmt: skip
DEFAULT_PROMPTS = PromptSet(prompts=tuple(TextPrompt(name, text) for name, text in _TEXTS.items()), cut=True)
