"""Dataclass fields as command-line options: name, type, default and help all come from the dataclass."""

import argparse
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

_METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_options(
    parser: argparse.ArgumentParser,
    config: type,
    title: str,
    defaults: Mapping[str, Any] | None = None,
    leave_out: Collection[str] = (),
) -> None:
    """Add a group with an option for each field of the dataclass `config`: `page_size` becomes `--page-size`.

    `defaults`: what the command uses where it differs from the dataclass, for the help; see `given_options`.
    `leave_out`: fields that get no option.
    """
    group = parser.add_argument_group(title)
    meanings, types = attribute_docs(config), get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name in leave_out:
            continue
        default = (defaults or {}).get(field.name, field.default)
        shown = "" if default in (None, dataclasses.MISSING) else f" (default: {default})"
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            default=argparse.SUPPRESS,  # so that the dataclass alone knows the defaults
            help=(meanings.get(field.name, "") + shown).replace("%", "%%"),
            **_argument_of(types[field.name]),
        )


def given_options(config: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of the dataclass `config` that stand on the command line."""
    names = [field.name for field in dataclasses.fields(config)]
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def attribute_docs(config: type) -> dict[str, str]:
    """Field name -> its text in the docstring's section `Attributes:`, on one line."""
    _, _, section = (inspect.getdoc(config) or "").partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.*\n?(?:      .*\n?)*)", section, re.MULTILINE)
    return {name: " ".join(text.replace("``", "").split()) for name, text in entries}


def _argument_of(annotation: Any) -> dict[str, Any]:
    """What `add_argument` has to know about a field of this type."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(annotation) is Literal:
        return {"choices": get_args(annotation)}
    if not kinds:
        return {"type": annotation, "metavar": _METAVARS[annotation]}
    if get_origin(kinds[-1]) is Sequence:  # also str | Sequence[str]
        (item,) = get_args(kinds[-1])
        return {"action": "append", "type": item, "metavar": _METAVARS[item]}
    if get_origin(kinds[0]) is Mapping:
        return {"type": _json, "metavar": "JSON"}
    return {"type": _or_none(kinds[0]), "metavar": _METAVARS[kinds[0]]}


def _or_none(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text.lower() == "none":
            return None
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {kind.__name__} or none, got {text!r}") from None

    return parse


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected JSON, got {text!r}: {error}") from None
