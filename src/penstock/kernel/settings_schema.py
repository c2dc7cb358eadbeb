"""How a setting is declared, read from code, environment and file, checked, and documented.

A class of settings is a frozen dataclass. Each field is declared once, by `setting`: its default,
its bounds, and where it may be set (`Place`); the docstring below it is its documentation. From
that declaration, and from nothing else, follow

- the variable of the environment and the key of the file, and what text or TOML value fits;
- the checks (`check`, from `__post_init__`), so that code is held to them too;
- which names are unknown, and which was probably meant, for all tables and variables;
- the rows of docs/settings.md and of `penstock settings`.

A value is the first that is there of: code or command line, the variables in their order, the key
in the file, the default. A `Schema` is all classes that share a file and an environment; a variable
or key that is declared twice is refused when it is made, for then an edit of one default would do
nothing. A schema that is not `is_whole` knows only its own tables of the file: queues are used
without the rest, and cannot know what else stands there. Tables that are for one reader, such as
`[runtimes.NAME]`, are read by `read_table`. Read at starts only; a crash leaves nothing.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, Final, Generic, TypeVar, get_args, get_origin, get_type_hints

from penstock.kernel.errors import InvalidInput
from penstock.kernel.units import DAY_MS, in_units, memory_bytes

PREFIX: Final = "PENSTOCK_"
DEFAULT_FILE: Final = "penstock.toml"
FILE_VARIABLE: Final = f"{PREFIX}SETTINGS"
_FILE_BYTES_MAX: Final = 1024 * 1024
_NEAR: Final = 0.75
_UNITS_MS: Final = {"secs": 1000, "seconds": 1000, "hours": 3_600_000, "days": DAY_MS}
"""Numbers whose names end so are times, and may be written with a unit."""
_AMOUNTS: Final = {3600: "an hour", 86_400: "a day"}
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"0", "false", "no", "off"})
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where settings stand: the key begins with `table`, the variable with `prefix`."""

    table: str | None = None
    """None where the file has none of them."""
    prefix: str | None = None
    is_empty_a_value: bool = False
    """Whether a variable that is set to an empty text counts as set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """Another variable of a setting, and another key; both may be switches for two values."""

    variable: str
    key: str = ""
    switch: tuple[str, str] | None = None
    """What it means if it is on, and if it is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    bounds: tuple[float, float] | None
    place: Place | None
    variable: str
    alias: Alias | None
    form: tuple[str, str] | None
    is_secret: bool
    like: type | None = None


_NOWHERE: Final = Place()
"""Of settings that code alone may give."""


def setting(
    default: Any,
    *,
    place: Place | None = None,
    least: float | None = None,
    most: float | None = None,
    variable: str = "",
    alias: Alias | None = None,
    form: tuple[str, str] | None = None,
    is_secret: bool = False,
) -> Any:
    """A field of a class of settings.

    Its place is that of its class, `PLACE`, unless it says one; without any, code alone may give
    it. `least` and `most` bound a number, or how many a list has. `variable` is what follows the
    prefix if it is not the name in capitals. `form` is a regular expression, and that in words.
    """
    bounds = None
    if least is not None or most is not None:
        bounds = (-math.inf if least is None else least, math.inf if most is None else most)
    said = _Said(
        bounds=bounds, place=place, variable=variable, alias=alias, form=form, is_secret=is_secret
    )
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata={"said": said}, repr=False)
    return field(default=default, metadata={"said": said})


@dataclass(frozen=True, slots=True)
class Declared:
    """A setting, as it was declared."""

    owner: type
    name: str
    type: Any
    default: Any
    said: _Said
    place: Place

    @property
    def variable(self) -> str:
        """Its own variable; empty if it has none."""
        prefix = self.place.prefix
        return "" if prefix is None else prefix + (self.said.variable or self.name.upper())

    @property
    def variables(self) -> tuple[str, ...]:
        """Its own, and that of its alias."""
        return tuple(
            filter(None, (self.variable, self.said.alias.variable if self.said.alias else ""))
        )

    @property
    def key(self) -> str:
        """Its key in the file; empty if it has none."""
        table = self.place.table
        return "" if table is None else table + self.name

    @property
    def keys(self) -> tuple[str, ...]:
        """Its own, and that of its alias."""
        return tuple(filter(None, (self.key, self.said.alias.key if self.said.alias else "")))

    @property
    def bounds(self) -> tuple[float, float] | None:
        return self.said.bounds

    @property
    def is_secret(self) -> bool:
        return self.said.is_secret

    @property
    def purpose(self) -> str:
        """What it is for, in one line."""
        return _purposes(self.said.like or self.owner).get(self.name, "")

    @property
    def unit_ms(self) -> int | None:
        """The unit of a time."""
        return _UNITS_MS.get(self.name.rpartition("_")[2])

    @property
    def is_size(self) -> bool:
        return self.type is int and "bytes" in self.name.split("_")

    def converted(self, found: Any) -> Any:
        """A value of its type; `ValueError` or `TypeError` if this cannot be one."""
        if self.type is float and self.unit_ms and isinstance(found, str):
            return in_units(found, unit_ms=self.unit_ms)
        if self.is_size and isinstance(found, str) and not found.isdigit():
            found = memory_bytes(found)
        return _converted(self.type, found)

    @property
    def wanted(self) -> str:
        """What it is, in words."""
        kind = self.type
        if get_origin(kind) is tuple:
            return "a list of texts"
        if _is_table(kind):
            return f"a table, as in [{self.key or self.name}], in the file only"
        if kind in (int, float):
            if self.is_size:
                return "a number of bytes, or a size such as 512MiB"
            unit = self.name.rpartition("_")[2].replace("secs", "seconds")
            return (
                f"a number of {unit}, or a time such as 30s or 2m" if self.unit_ms else "a number"
            )
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return f"one of {', '.join(kind)}"
        return {bool: "true or false", Path: "a folder"}.get(kind, "a text")


def declared(kind: type) -> tuple[Declared, ...]:
    """The settings of a class, in their order; fields that `setting` did not make are none."""
    return _declared(kind)


@cache
def _declared(kind: type) -> tuple[Declared, ...]:
    hints = get_type_hints(kind)
    return tuple(
        Declared(
            owner=kind,
            name=each.name,
            type=_plain(hints[each.name]),
            default=each.default if each.default_factory is MISSING else each.default_factory(),
            said=each.metadata["said"],
            place=each.metadata["said"].place or getattr(kind, "PLACE", _NOWHERE),
        )
        for each in fields(kind)
        if "said" in each.metadata
    )


def declared_in(kind: type, name: str) -> Any:
    """A field for a setting that another class declares: its default, bounds and documentation."""
    (found,) = (each for each in declared(kind) if each.name == name)
    return field(
        default=found.default, metadata={"said": replace(found.said, place=None, like=kind)}
    )


def check(settings: Any) -> None:
    """Hold an object to what is declared of its class; texts become the choices that they name.

    `InvalidInput` begins with the name of the setting.
    """
    for each in declared(type(settings)):
        value = getattr(settings, each.name)
        if isinstance(each.type, type) and issubclass(each.type, StrEnum):
            if not isinstance(value, each.type):
                object.__setattr__(settings, each.name, _read(each, value, each.name, ""))
        elif value is None:
            continue
        elif each.bounds is not None:
            _check_bounds(each, value)
        elif each.said.form is not None and not re.fullmatch(each.said.form[0], value):
            raise InvalidInput(f"{each.name} must be {each.said.form[1]}, not {value!r:.100}.")


def _check_bounds(each: Declared, value: Any) -> None:
    least, most = each.bounds or (0, 0)
    size = len(value) if isinstance(value, tuple) else value
    if least <= size <= most:
        return
    what = f"{each.name} must be"
    if isinstance(value, tuple):
        raise InvalidInput(f"{what} a list of {most:g} at most.")
    shown = [_amount(each, bound) for bound in (least, most)]
    if math.isinf(most):
        raise InvalidInput(f"{what} {shown[0]} or more.")
    raise InvalidInput(f"{what} between {shown[0]} and {shown[1]}.")


def _amount(each: Declared, value: float) -> str:
    if each.unit_ms != _UNITS_MS["seconds"]:
        return f"{value:g}"
    return _AMOUNTS.get(int(value), f"{value:g} s")


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A file of settings, as it was read."""

    path: Path
    table: Mapping[str, Any]

    def find(self, key: str) -> Any:
        """What stands under a key, as in `worker.stop_seconds`; None if nothing does."""
        found: Any = self.table
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found


@dataclass(frozen=True, slots=True)
class ReadSettings(Generic[Kind]):
    """Settings, and where each came from, by name."""

    settings: Kind
    origins: Mapping[str, str]


class Schema:
    """All settings that may stand in one file and one environment."""

    def __init__(
        self, *kinds: type, others: Mapping[str, str] | None = None, is_whole: bool = True
    ) -> None:
        """`others` are variables that are no settings, and what they are for."""
        self.kinds = kinds
        self.others: Mapping[str, str] = others or {}
        self.settings = [each for kind in kinds for each in declared(kind)]
        self._is_whole = is_whole
        names = [name for each in self.settings for name in (*each.variables, *each.keys)]
        names += self.others
        if twice := {name for name in names if names.count(name) > 1}:
            raise TypeError(f"{', '.join(sorted(twice))}: declared more than once")
        self.variables = frozenset(
            {*self.others, *(name for each in self.settings for name in each.variables)}
        )
        self._keys = [key for each in self.settings for key in each.keys]

    def file(self, environment: Mapping[str, str], folder: Path) -> SettingsFile | None:
        """The file that holds here, if there is one, of which every name is known."""
        path = settings_file(environment, folder)
        if path is None:
            return None
        try:
            with path.open("rb") as opened:
                table = tomllib.loads(opened.read(_FILE_BYTES_MAX).decode())
        except FileNotFoundError:
            raise InvalidInput(f"There is no settings file {path}.") from None
        except OSError as error:
            raise InvalidInput(f"{path} cannot be read: {error.strerror}.") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidInput(
                f"{path} is not TOML: {error}",
                hint="A setting is a line such as port = 8080; a text is in quotes:"
                " host = '127.0.0.1'",
            ) from error
        self._check_names(path, table, "")
        return SettingsFile(path, table)

    def read(
        self,
        kind: type[Kind],
        *,
        environment: Mapping[str, str],
        file: SettingsFile | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> ReadSettings[Kind]:
        """One class of them; what is None in `given` was not given."""
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for each in declared(kind):
            found = next(_candidates(each, given or {}, environment, file), None)
            if found is not None:
                values[each.name], origins[each.name] = found
        try:
            return ReadSettings(
                kind(**values), {**dict.fromkeys(_names(kind), "default"), **origins}
            )
        except InvalidInput as error:
            name = re.split(r"[^a-z_]", error.message, maxsplit=1)[0]
            if name not in origins:
                raise
            message = f"{error.message.rstrip('.')} ({origins[name]})."
            raise InvalidInput(message, hint=error.hint) from None

    def misspelt(self, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Variables that nobody reads and that are nearly ones that are read, and those."""
        # The prefix is the same in all, and would make all alike.
        endings = {each.removeprefix(PREFIX): each for each in sorted(self.variables)}
        for name in sorted(environment):
            if name.startswith(PREFIX) and name not in self.variables:
                meant = near(name.removeprefix(PREFIX), endings)
                if meant:
                    yield name, endings[meant]

    def _check_names(self, path: Path, table: Mapping[str, Any], before: str) -> None:
        for name, value in table.items():
            key = f"{before}{name}"
            inside = [each for each in self._keys if each.startswith(f"{key}.")]
            if inside and isinstance(value, Mapping):
                self._check_names(path, value, f"{key}.")
            elif key not in self._keys:
                self._refuse(path, key, is_table=isinstance(value, Mapping))

    def _refuse(self, path: Path, key: str, *, is_table: bool) -> None:
        before, _, name = key.rpartition(".")
        start = f"{before}." if before else ""
        beside = {each.removeprefix(start).partition(".")[0]: each for each in self._keys}
        beside = {part: each for part, each in beside.items() if each.startswith(start)}
        meant = near(name, beside)
        if not self._is_whole and not before and not (is_table and meant) and name not in beside:
            return
        elsewhere = [each for each in self._keys if each.rpartition(".")[2] == name]
        ask = f"{start}{meant}" if meant else next(iter(elsewhere), "")
        raise InvalidInput(
            f"{path} has {key!r}, which is not a setting.",
            hint=f"Did you mean {ask}?"
            if ask
            else f"Settings are {', '.join(start + each for each in beside)}.",
        )


def settings_file(environment: Mapping[str, str], folder: Path) -> Path | None:
    """Where settings are read from, if there is such a file."""
    if named := environment.get(FILE_VARIABLE):
        return folder / named
    default = folder / DEFAULT_FILE
    return default if default.is_file() else None


def read_table(kind: type[Kind], table: Mapping[str, Any], *, whose: str) -> Kind:
    """The settings of a table that is no place of a schema; `whose` says which it is."""
    known = {each.name: each for each in declared(kind)}
    values: dict[str, Any] = {}
    for name, found in table.items():
        label = f"{name!r} in the settings of {whose}"
        if name not in known:
            meant = near(name, known)
            raise InvalidInput(
                f"{label} is not a setting.",
                hint=f"Did you mean {meant}?" if meant else f"There are {', '.join(known)}.",
            )
        values[name] = _read(known[name], found, label, "")
    try:
        return kind(**values)
    except InvalidInput as error:
        name, _, rest = error.message.partition(" ")
        if name not in known:
            raise
        raise InvalidInput(f"{name!r} in the settings of {whose} {rest}", hint=error.hint) from None


def near(name: str, names: Iterable[str]) -> str:
    """The name that was probably meant; empty if it is like none."""
    return next(iter(get_close_matches(name[:200], list(names), n=1, cutoff=_NEAR)), "")


def _candidates(
    each: Declared,
    given: Mapping[str, Any],
    environment: Mapping[str, str],
    file: SettingsFile | None,
) -> Iterator[tuple[Any, str]]:
    """The values that there are, the one that counts first, and where each came from."""
    if given.get(each.name) is not None:
        origin = "the command line"
        yield _read(each, given[each.name], each.name, f" ({origin})"), origin
    for variable in each.variables:
        found = environment.get(variable)
        if found or (found is not None and each.place.is_empty_a_value):
            yield _read(each, found, variable, "", is_alias=variable != each.variable), variable
    for key in each.keys if file is not None else ():
        found = file.find(key) if file is not None else None
        if found is not None and file is not None:
            where = f" ({file.path})"
            yield _read(each, found, key, where, is_alias=key != each.key), str(file.path)


def _read(each: Declared, found: Any, label: str, where: str, *, is_alias: bool = False) -> Any:
    switch = each.said.alias.switch if is_alias and each.said.alias else None
    is_switch = switch is not None or each.type is bool
    # In a file there are words for it, and texts are no such words.
    read = None if is_switch and where and not isinstance(found, bool) else found
    try:
        if switch:
            return switch[0] if _converted(bool, read) else switch[1]
        return each.converted(read)
    except (ValueError, TypeError):
        wanted = each.wanted
        if is_switch:
            wanted = "true or false" if where else "1 or 0"
        is_shown = not each.is_secret and not isinstance(found, Mapping)
        said = f", not {found!r:.100}" if is_shown else ""
        raise InvalidInput(f"{label} must be {wanted}{said}{where}.") from None


def _converted(kind: Any, found: Any) -> Any:
    """A value of a plain type, of one that a file, a variable or code had."""
    if get_origin(kind) is tuple:
        parts = found.split(",") if isinstance(found, str) else found
        if isinstance(parts, list | tuple):
            return tuple(map(str, parts))
    elif _is_table(kind):
        inner = (get_args(kind) or (str, Any))[1]
        if isinstance(found, Mapping):
            return {name: _converted(inner, each) for name, each in found.items()}
    elif kind is bool:
        word = str(found).strip().lower()
        if word in _YES or word in _NO:
            return word in _YES
    elif kind in (int, float):
        return _number(kind, found)
    elif kind is Any or (kind is str and isinstance(found, str)):
        return found
    elif isinstance(kind, type) and issubclass(kind, StrEnum | Path):
        return kind(found)
    raise TypeError


def _number(kind: type, found: Any) -> Any:
    is_whole = isinstance(found, str | int) or float(found).is_integer()
    if isinstance(found, bool) or (kind is int and not is_whole):
        raise TypeError
    return kind(found)


def _is_table(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _plain(kind: Any) -> Any:
    """The type without None, and without what stands for it as a literal."""
    if isinstance(kind, type) or get_origin(kind) in (tuple, dict, Mapping):
        return kind
    return next((each for each in get_args(kind) if each is not NoneType), kind)


def _names(kind: type) -> list[str]:
    return [each.name for each in declared(kind)]


@cache
def _purposes(kind: type) -> Mapping[str, str]:
    """The docstrings below the fields of a class and of those that it is made from."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        (made,) = ast.parse(inspect.getsource(each)).body
        body = made.body if isinstance(made, ast.ClassDef) else []
        for node, after in pairwise(body):
            match node, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    found[name] = " ".join(text.split())
    return found
