"""Click options from a struct's fields, so that name, type, default and help are written once."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click
import msgspec

from stack.cli.common import mistakes_as_errors
from stack.option import Opt

_Command = Callable[..., Any]
_UNSEEN = (None, "", (), False)  # defaults that a help text does not show


def options_of(make: Callable[..., Any], into: str, **parts: Callable[..., Any]) -> Callable[[_Command], _Command]:
    """Add an option for each field of a dataclass, and call the command with one value of it as `into`.

    A field is annotated with an Opt, or with a click option that several commands share. One that is a dataclass itself
    stands for the options of its fields; parts: functions that make others, by field. Whatever refuses a value with a
    ValueError is shown as one sentence."""
    struct = _Struct.of(make, parts)

    def added(command: _Command) -> _Command:
        @functools.wraps(command)
        def run(**given: Any) -> Any:
            with mistakes_as_errors():
                value = struct.made(given)
            return command(**{into: value}, **given)

        decorated: _Command = run
        for option in reversed(list(struct.options())):
            decorated = option(decorated)
        return decorated

    return added


@dataclass(frozen=True, slots=True)
class _Option:
    """option: the decorator. convert: from the value of click; None where it is used as it is."""

    option: Callable[[_Command], _Command]
    convert: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class _Struct:
    make: Callable[..., Any]
    fields: dict[str, _Option | _Struct]

    @classmethod
    def of(cls, make: Callable[..., Any], parts: dict[str, Callable[..., Any]]) -> _Struct:
        hints = get_type_hints(make, include_extras=True)
        fields: dict[str, _Option | _Struct] = {}
        for name, parameter in inspect.signature(make).parameters.items():
            kind, said = _annotated(hints[name])
            if name in parts:
                fields[name] = cls.of(parts[name], {})
            elif not said and isinstance(kind, type) and dataclasses.is_dataclass(kind):
                fields[name] = cls.of(kind, {})
            elif shared := next((one for one in said if inspect.isfunction(one)), None):
                fields[name] = _Option(shared)
            elif opt := next((one for one in said if isinstance(one, Opt)), None):
                fields[name] = _option(name, kind, opt, said, _default(make, parameter))
        return cls(make, fields)

    def options(self) -> Iterator[Callable[[_Command], _Command]]:
        for field in self.fields.values():
            if isinstance(field, _Struct):
                yield from field.options()
            else:
                yield field.option

    def made(self, given: dict[str, Any]) -> Any:
        """Take the values of the fields out of `given`. An option that was not given leaves its field as it is."""
        values: dict[str, Any] = {}
        for name, field in self.fields.items():
            if isinstance(field, _Struct):
                values[name] = field.made(given)
            elif (value := given.pop(name)) is not None:
                values[name] = field.convert(value) if field.convert else value
        return self.make(**values)


def _annotated(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type without None, and what the annotation adds to it."""
    said: tuple[Any, ...] = getattr(hint, "__metadata__", ())
    kind = get_args(hint)[0] if said else hint
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (one for one in get_args(kind) if one is not types.NoneType)
    return kind, said


def _default(make: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """None where the field makes one anew, and inspect.Parameter.empty where there is none."""
    made = dataclasses.fields(make) if dataclasses.is_dataclass(make) else ()
    factories = {field.name for field in made if field.default_factory is not dataclasses.MISSING}
    return None if parameter.name in factories else parameter.default


def _option(name: str, kind: Any, opt: Opt, said: tuple[Any, ...], default: Any) -> _Option:
    multiple = get_origin(kind) is tuple
    one = get_args(kind)[0] if multiple else kind
    required = default is inspect.Parameter.empty
    usual = None if required else default if opt.write is None or default is None else opt.write(default)
    is_enum = isinstance(one, type) and issubclass(one, enum.Enum)
    given: dict[str, Any] = {
        "help": opt.help,
        "metavar": opt.metavar,
        "envvar": opt.envvar,
        "show_envvar": opt.envvar is not None,
        "required": required,
    }
    if one is bool:
        given |= {"is_flag": True} | ({"default": None} if default is None else {})
    else:
        given |= {
            "type": _type(one, opt, said),
            "multiple": multiple,
            "show_default": usual not in _UNSEEN,
            "callback": _reading(opt.read) if opt.read else None,
        }
        if usual is not None:
            given["default"] = usual.value if isinstance(usual, enum.Enum) else usual
    option = click.option(opt.name or "--" + name.replace("_", "-"), name, **given)
    return _Option(option, one if is_enum else opt.convert)


def _reading(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    def callback(_: click.Context, __: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else read(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def _type(kind: Any, opt: Opt, said: tuple[Any, ...]) -> click.ParamType[Any] | None:
    """None is text."""
    if named := next((one for one in said if isinstance(one, click.ParamType)), None):
        return named
    if opt.read or opt.convert:
        return None
    if opt.choices or get_origin(kind) is Literal:
        return click.Choice(opt.choices or get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return click.Choice([member.value for member in kind])
    if kind is Path:
        return click.Path(path_type=Path, dir_okay=not opt.file, exists=opt.exists)
    if kind in (int, float):
        return _number(kind, next((one for one in said if isinstance(one, msgspec.Meta)), msgspec.Meta()))
    return None


def _number(kind: Any, bounds: msgspec.Meta) -> click.ParamType[Any]:
    least, most = (bounds.gt if bounds.ge is None else bounds.ge), (bounds.lt if bounds.le is None else bounds.le)
    if least is None and most is None:
        return click.INT if kind is int else click.FLOAT
    limits = {"min_open": bounds.gt is not None, "max_open": bounds.lt is not None}
    if kind is int:
        return click.IntRange(None if least is None else int(least), None if most is None else int(most), **limits)
    return click.FloatRange(least, most, **limits)
