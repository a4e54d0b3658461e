"""Work of records: finished requests, and tokens."""

from __future__ import annotations

import operator
from typing import NamedTuple

import msgspec


class FinishedRequest(NamedTuple):
    """Finished requests, counted as an engine counts them: each of n, each prompt. missing: records without usage.

    unreadable: requests that failed because the answer could not be read, which an engine may have finished."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    missing: int = 0
    unreadable: int = 0

    def plus(self, other: FinishedRequest) -> FinishedRequest:
        return FinishedRequest._make(mine + its for mine, its in zip(self, other, strict=True))

    def minus(self, other: FinishedRequest) -> FinishedRequest:
        return FinishedRequest._make(mine - its for mine, its in zip(self, other, strict=True))


class Work(msgspec.Struct, frozen=True):
    """Tokens of requests. Cached tokens are part of the prompt tokens, and are tokens, never blocks."""

    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    completion_tokens: float = 0.0

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens that were not cached."""
        return max(0.0, self.prompt_tokens - self.cached_tokens)

    def since(self, before: Work) -> Work:
        """Return the increase of cumulative values. A value that decreased restarted from 0."""
        return Work(
            *(
                now - then if now >= then else now
                for now, then in zip(*map(msgspec.structs.astuple, (self, before)), strict=True)
            )
        )

    def plus(self, other: Work) -> Work:
        return Work(*map(sum, zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)))

    def minus(self, other: Work) -> Work:
        return Work(*map(operator.sub, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))

    def at_most(self, other: Work) -> Work:
        return Work(*map(min, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))
