"""Search the runbooks: by name, by the closest name, then by words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from runbooks.page import RunbookPage

_LABEL = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NAME_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # KVCacheNearlyFull: KV, Cache, Nearly, Full


@dataclass(frozen=True, slots=True)
class PageSearch:
    """One page, none, or several that are meant as likely, the likeliest first. by_name: whether one was named, or only
    looked like it."""

    pages: tuple[RunbookPage, ...] = ()
    by_name: bool = False


def split_query(words: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the words to search, and the labels among them: `name=value`, or the query of a runbook's URL.

    A URL as in a notification stands for its page and the labels of its alert."""
    rest, labels = list[str](), dict[str, str]()
    for word in words:
        if "://" in word:
            url = urlsplit(word)
            rest.append(url.path.rstrip("/").rsplit("/", 1)[-1])
            labels |= {name: value for name, value in parse_qsl(url.query) if name != "live"}
        elif found := _LABEL.fullmatch(word):
            labels[found[1]] = found[2]
        else:
            rest.append(word)
    return " ".join(rest), labels


def find(query: str, among: Sequence[RunbookPage]) -> PageSearch:
    """Find pages by name, in any case, with or without VLLM, and as the end of an address; else by the closest name;
    else by the words of the pages, whole words first."""
    wanted = _squeezed(query.strip().rstrip("/").rsplit("/", 1)[-1].removesuffix(".md"))
    if not wanted:
        return PageSearch()
    for page in among:
        if wanted in (_squeezed(page.name), _short(page.name)):
            return PageSearch((page,), by_name=True)
    if near := _nearest(wanted, among, least=0.8):
        # one wrong letter of twenty is no reason to choose
        best = [page for share, page in near if share >= near[0][0] - 0.05]
        return PageSearch(tuple(best))
    words = re.findall(r"\w+", query.lower())
    return PageSearch(_best(words, among, whole=True) or _best(words, among, whole=False))


def _best(words: Sequence[str], among: Sequence[RunbookPage], whole: bool) -> tuple[RunbookPage, ...]:
    """Return the pages of the highest score. whole: a word matches whole words only, not parts of longer ones."""
    scores = [_score(page, words, whole) for page in among]
    highest = max(scores, default=0)
    return tuple(page for page, score in zip(among, scores, strict=True) if score and score == highest)


def nearest(query: str, among: Sequence[RunbookPage], most: int = 5) -> list[str]:
    """Return the names nearest to a query that found nothing."""
    return [page.name for _, page in _nearest(_squeezed(query), among, least=0.5)[:most]]


def _nearest(wanted: str, among: Sequence[RunbookPage], least: float) -> list[tuple[float, RunbookPage]]:
    shares = (
        (difflib.SequenceMatcher(None, wanted.removeprefix("vllm"), _short(page.name)).ratio(), page) for page in among
    )
    return sorted(((share, page) for share, page in shares if share >= least), key=lambda one: -one[0])


def _squeezed(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _short(name: str) -> str:
    return _squeezed(name).removeprefix("vllm")


def _score(page: RunbookPage, words: Sequence[str], whole: bool) -> int:
    """Return how near to the top of a page the words are; 0 unless it has them all."""
    heads = " ".join([page.title, *(section.heading for section in page.sections), *_words(page)])
    name = " ".join([page.name, *_NAME_WORD.findall(page.name.removeprefix("VLLM"))])
    places = ((8, name.lower()), (4, heads.lower()), (1, page.body.lower()))
    end = r"\b" if whole else ""
    patterns = [re.compile(f"{end}{re.escape(word)}{end}") for word in words]
    scores = [max((weight for weight, place in places if each.search(place)), default=0) for each in patterns]
    return sum(scores) if all(scores) else 0


def _words(page: RunbookPage) -> Iterator[str]:
    yield from map(str, page.about.values())
    if page.alert:
        yield from (page.severity, page.alert.panel.board, page.alert.panel.panel)
