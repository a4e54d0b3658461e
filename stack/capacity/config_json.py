"""Reader of a model's config.json, with every number checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")  # the width of a model, by its usual names
LARGEST = 100_000_000  # no field of a published model comes near; more is a typing mistake
_SHOWN = 40  # letters of a wrong value


class BadModel(ValueError):
    """A configuration that no memory can be computed from: one sentence that names the field and the way out."""


class ConfigFields:
    """The fields of one model's configuration; later mappings fill in what earlier ones leave out."""

    def __init__(self, where: str, *levels: Mapping[str, Any]) -> None:
        self.where = where
        self._levels = levels

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands; an explicit null stands too, so that it switches a family's own default off."""
        return next((level[name] for level in self._levels if name in level), default)

    def whole(self, *names: str, default: int | None = None, largest: int = LARGEST) -> int:
        """A positive whole number under the first of these names that is there; raises BadModel."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or value != value
                or value in (float("inf"), float("-inf"))
            ):
                raise BadModel(
                    f"{self.where}: {name} should be a whole number and is {shown(value)}; take config.json as the"
                    " model's authors published it"
                )
            if value != int(value) or not 1 <= value <= largest:
                raise BadModel(
                    f"{self.where}: {name} should lie between 1 and {largest:,} and is {shown(value)}; take config.json"
                    " as it was published"
                )
            return int(value)
        if default is None:
            raise BadModel(
                f"{self.where}: {names[0]} is missing, and without it the KV cache cannot be computed; take the model's"
                " whole config.json"
            )
        return default

    def count(self, *names: str, default: int = 0) -> int:
        """A whole number that may also be zero or absent."""
        value = next((self.get(name) for name in names if self.get(name) is not None), default)
        return 0 if value == 0 and not isinstance(value, bool) else self.whole(*names, default=default or None)

    def switch(self, name: str, default: bool = False) -> bool:
        """True or false; raises BadModel."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadModel(f"{self.where}: {name} should be true or false and is {shown(value)}")
        return value

    def places(self, name: str) -> frozenset[int]:
        """Numbers of layers, counted from 0; none where the field is absent; raises BadModel."""
        value = self.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise BadModel(f"{self.where}: {name} should be a list of layers' numbers and is {shown(value)}")
        return frozenset(value)

    def names(self, name: str, length: int) -> tuple[str, ...] | None:
        """One word per layer, or None where the field is absent; raises BadModel when their number is another."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadModel(f"{self.where}: {name} should be a list of words, one for each layer")
        if len(value) != length:
            raise BadModel(
                f"{self.where}: {name} has {len(value)} entries and the model {length} layers; one of the two is wrong"
            )
        return tuple(value)


def shown(value: Any) -> str:
    """A wrong value as a sentence quotes it."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
