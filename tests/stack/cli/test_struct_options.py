"""Options made from a struct: what click is given, and the value that the command gets."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import click
import msgspec
import pytest
from click.testing import CliRunner

from exporters.text import format_duration, parse_duration
from stack.cli.struct_options import options_of
from stack.option import Opt


def typed(seconds: float) -> str:
    return format_duration(int(seconds))


def split(given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(given[0].split("=")) if given else ()


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Place:
    url: Annotated[str | None, click.option("--url", help="Shared.")] = None
    file: Annotated[Path | None, Opt(name="--the-file", file=True, help="A file.")] = None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    name: Annotated[str, Opt(metavar="NAME", help="Its name.")]
    count: Annotated[int | None, msgspec.Meta(ge=1), Opt(help="How many.")] = None
    share: Annotated[float, msgspec.Meta(gt=0, le=1), Opt()] = 0.5
    words: Annotated[tuple[str, ...], Opt(name="--word")] = ()
    kind: Annotated[Literal["a", "b"], Opt()] = "a"
    colour: Annotated[Colour, Opt()] = Colour.RED
    span_s: Annotated[float, Opt(name="--span", read=parse_duration, write=typed)] = 900.0
    pair: Annotated[tuple[str, ...], Opt(convert=split)] = ()
    place: Place = field(default_factory=Place)
    doubled: int = 0
    loud: Annotated[bool, Opt()] = False

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("--name bad")


def double(number: Annotated[int, Opt()] = 2) -> int:
    return 2 * number


def asked(*args: str):
    """The value that a command gets, or its exit status and what it says."""
    values = []

    @click.command()
    @options_of(Wanted, "wanted", doubled=double)
    @click.option("--json", "as_json", is_flag=True)
    def command(wanted: Wanted, as_json: bool) -> None:
        values.append((wanted, as_json))

    result = CliRunner().invoke(command, args)
    return values[0] if values else (result.exit_code, result.output)


def test_what_is_not_given_is_the_default_of_the_field():
    assert (Wanted(name="x", doubled=4), False) == asked("--name", "x")


def test_every_kind_of_field_gets_its_value():
    given = (
        "--name=x --count=3 --share=1 --word=one --word=two --kind=b --colour=blue --span=2m --pair=k=v --url=u"
        " --the-file=f --number=5 --loud --json"
    )
    expected = Wanted(
        name="x", count=3, share=1.0, words=("one", "two"), kind="b", colour=Colour.BLUE, span_s=120.0,
        pair=("k", "v"), place=Place(url="u", file=Path("f")), doubled=10, loud=True,
    )  # fmt: skip
    assert (expected, True) == asked(*given.split())


@pytest.mark.parametrize(("args", "facts"), [
    ((), "Missing option '--name'"),
    (("--name=x", "--count=0"), "x>=1"),
    (("--name=x", "--share=0"), "0<x<=1"),
    (("--name=x", "--kind=c"), "'--kind': 'c' .*'a', 'b'"),
    (("--name=x", "--colour=RED"), "'--colour': 'RED' .*'red', 'blue'"),
    (("--name=x", "--span=soon"), "Invalid value for '--span'"),
    (("--name=x", "--the-file=."), "is a directory"),
    (("--name=bad",), "Error: --name bad"),
])  # fmt: skip
def test_a_wrong_value_is_refused_with_status_2(args, facts):
    status, output = asked(*args)
    assert 2 == status
    assert re.search(facts, output), output


def test_help_shows_defaults_as_they_are_typed():
    _, text = asked("--help")
    for shown in (
        "--name NAME",
        "[required]",
        "[default: 15m]",
        "[default: red]",
        "[default: a]",
        "[default: 0.5; 0<x<=1]",
    ):
        assert shown in text
    assert "[default: ()]" not in text
    assert text.index("--name") < text.index("--span") < text.index("--url") < text.index("--number")
