"""A dataset's columns as an Iceberg schema, with field ids that never change their meaning. Pure.

A **field id** is made of what it stands for, and of nothing else: the path of the field (names of
struct fields, the element of a list, the key or value of a map) and its **lineage**, which is the
type as far as Iceberg cannot promote it: all whole numbers are one lineage, `float` and `double`
another, decimals of one scale another. So

- an id is the same in every generation and for every dispatcher, and nobody has to reserve it, or
  to keep it (decision 0072);
- the same name with an incompatible type has another id, and has the first again when it returns;
- two fields of one table would share an id once in millions of tables (ids have 31 bits). Such a
  schema is refused with the names, as is a type that Iceberg does not have.

Within a lineage the type of an id only grows: `schema_of` takes the table's earlier schemas, and a
column that was `bigint` once stays `long`, also where a later generation writes `int`. All fields
are optional: files say nothing else.

Files that Penstock writes have these ids (`penstock.datasets.parquet_footer`), or none: those of
before, and what others have brought to a bucket. Such are read by names, with the one
`name_mapping` that a table has. That is right for a file as long as each of its columns has the id
that the mapping gives to the name: `misread` says where not, and such a file, with ids or without,
is in no snapshot that is shown.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, TypeAlias

from penstock.datasets.schema import TASK_COLUMN, Column, field_of, parts_of
from penstock.kernel.errors import InvalidInput

ID_MIN: Final = 10_000
"""Lower ones are those of partition fields and of manifests' own columns."""
ID_MAX: Final = 2_147_483_447
"""Higher ones are reserved."""
_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")
_TEXT: Final = re.compile(r"string collate .*|(?:var)?char\(\d+\)", re.IGNORECASE)
_WORDS: Final = {
    "boolean": "boolean",
    "tinyint": "int",
    "smallint": "int",
    "int": "int",
    "bigint": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date": "date",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
}
_ORDERS: Final = (("int", "long"), ("float", "double"))
"""What Iceberg promotes, the narrowest first."""
_DEPTH_MAX: Final = 50
_PARTITION: Final = "partition"

Step: TypeAlias = str
"""Of a path: `.name` of a field, or `[]`, `{key}`, `{value}`."""


@dataclass(frozen=True, slots=True)
class Struct:
    """Fields by name."""

    fields: tuple[SchemaField, ...]


@dataclass(frozen=True, slots=True)
class ListType:
    """A list of elements."""

    element: SchemaField


@dataclass(frozen=True, slots=True)
class MapType:
    """A map of keys to values."""

    key: SchemaField
    value: SchemaField


FieldType: TypeAlias = str | Struct | ListType | MapType
"""A primitive type in Iceberg's words, such as `long` or `decimal(10, 2)`, or a nested one."""


@dataclass(frozen=True, slots=True)
class SchemaField:
    """A field. Of a list its name is `element`, of a map `key` and `value`."""

    id: int
    name: str
    type: FieldType
    doc: str = ""


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A schema of a table."""

    schema_id: int
    fields: tuple[SchemaField, ...]

    def by_name(self) -> Mapping[str, SchemaField]:
        """The fields at the top."""
        return {each.name: each for each in self.fields}

    def every(self) -> Iterator[tuple[str, SchemaField]]:
        """All fields with their full names, such as `a.element.b`; outer ones first."""
        yield from _every(self.fields, "")


def field_id(path: Sequence[Step], lineage: str) -> int:
    """The id of a field: always the same for the same path and lineage."""
    text = json.dumps([*path, lineage], ensure_ascii=True)
    number = int.from_bytes(hashlib.sha256(b"penstock field\x00" + text.encode()).digest()[:8])
    return ID_MIN + number % (ID_MAX - ID_MIN + 1)


@lru_cache(maxsize=4096)
def fields_of(columns: tuple[Column, ...]) -> tuple[SchemaField, ...]:
    """The columns as fields. Raises `InvalidInput`: which type, and that there is no table."""
    return tuple(_column(each) for each in columns)


def ids_of(columns: Sequence[Column]) -> Iterator[int]:
    """The ids of columns, each before those in it; none where one has a type of no table."""
    try:
        every = list(_every(fields_of(tuple(columns)), ""))
    except InvalidInput:
        return
    yield from (each.id for _, each in every)


def partition_field(name: str, type_: str = "string", doc: str = "") -> SchemaField:
    """The field of a partition's value, which is in no file: its id is that of no column."""
    return SchemaField(field_id([_PARTITION, name], type_), name, type_, doc)


def schema_of(
    columns: Sequence[Column],
    *,
    schema_id: int,
    extra: Sequence[SchemaField] = (),
    earlier: Iterable[TableSchema] = (),
) -> TableSchema:
    """The schema of columns, and of `extra` fields at the end, in a table that had `earlier` ones.

    What is equal to an earlier one but for its id needs no writing: compare `fields`. Raises
    `InvalidInput` with a sentence that says why the dataset is no table.
    """
    if not columns:
        raise InvalidInput("The dataset has no schema yet.")
    held: dict[int, tuple[str, SchemaField]] = {}
    for schema in earlier:
        for name, each in schema.every():
            held.setdefault(each.id, (name, each))
            held[each.id] = (held[each.id][0], _widest(held[each.id][1], each))
    fields = tuple(_grown(each, held) for each in (*fields_of(tuple(columns)), *extra))
    made = TableSchema(schema_id, fields)
    names = {identity: name for identity, (name, _) in held.items()}
    seen: set[str] = set()
    for name, each in made.every():
        other = names.setdefault(each.id, name)
        if other != name:
            raise InvalidInput(
                f"The columns {other!r} and {name!r} have the same field id.",
                hint="Rename one of them: ids are hashes of names.",
            )
        if name in seen:
            raise InvalidInput(
                f"Two of its columns are called {name!r} in Iceberg.",
                hint="Give one a name without a dot.",
            )
        seen.add(name)
    return made


def misread(columns: Sequence[Column], schema: TableSchema) -> str | None:
    """Why files of these columns cannot be read with a table's current schema; None if they can.

    Asked of the columns of each publication that a snapshot shows. Within a generation it happens
    where a decimal has got more digits after its point, and there is no table until the next one;
    an earlier snapshot, of a generation with another type, is not shown any more.
    """
    return _clash(fields_of(tuple(columns)), schema)


def clash(earlier: TableSchema, current: TableSchema) -> str | None:
    """The same of all files that were written with an earlier schema of the table."""
    return _clash(earlier.fields, current)


def _clash(fields: Iterable[SchemaField], schema: TableSchema) -> str | None:
    there = dict(schema.every())
    for name, each in _every(fields, ""):
        other = there.get(name)
        if other is not None and other.id != each.id:
            return (
                f"The column {name!r} is {_word(other.type)} now, and {_word(each.type)} in files"
                " that Iceberg cannot read as that."
            )
    return None


def schema_json(schema: TableSchema) -> dict[str, Any]:
    """A schema as table metadata has it."""
    fields = [_field_json(each) for each in schema.fields]
    return {"type": "struct", "schema-id": schema.schema_id, "fields": fields}


def schema_from_json(said: Mapping[str, Any]) -> TableSchema:
    """What `schema_json` has made."""
    return TableSchema(said["schema-id"], tuple(_field_from(each) for each in said["fields"]))


def name_mapping(
    schema: TableSchema,
    *,
    earlier: Iterable[TableSchema] = (),
) -> list[dict[str, Any]]:
    """The property `schema.name-mapping.default` of a table, before it is written as JSON.

    PyIceberg refuses a file with a column that is not in it. So it has the columns of `earlier`
    schemas too, as far as there is nothing of that name in the current one, and the one that only
    merges read.
    """
    fields = list(schema.fields)
    for each in earlier:
        fields = _united(fields, each.fields)
    return [_mapped(each) for each in _united(fields, fields_of((TASK_COLUMN,)))]


def _column(column: Column) -> SchemaField:
    try:
        return _field(column.name, column.type, [f".{column.name}"])
    except InvalidInput as error:
        raise InvalidInput(f"The column {column.name!r} {error}.") from error


def _field(name: str, word: str, path: list[Step]) -> SchemaField:
    if len(path) > _DEPTH_MAX:
        raise InvalidInput("is nested too deeply")
    kind, inner = parts_of(word)
    match kind:
        case "struct":
            pairs = [(_unquoted(each), type_) for each, type_ in map(field_of, inner)]
            nested = (_field(each, type_, [*path, f".{each}"]) for each, type_ in pairs)
            return SchemaField(field_id(path, kind), name, Struct(tuple(nested)))
        case "array" if len(inner) == 1:
            element = _field("element", inner[0], [*path, "[]"])
            return SchemaField(field_id(path, "list"), name, ListType(element))
        case "map" if len(inner) == 2:
            key = _field("key", inner[0], [*path, "{key}"])
            value = _field("value", inner[1], [*path, "{value}"])
            return SchemaField(field_id(path, "map"), name, MapType(key, value))
    type_ = _primitive(word)
    return SchemaField(field_id(path, _lineage(type_)), name, type_)


def _unquoted(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


def _primitive(word: str) -> str:
    found = _DECIMAL.fullmatch(word)
    if found:
        return f"decimal({int(found[1])}, {int(found[2])})"
    type_ = "string" if _TEXT.fullmatch(word) else _WORDS.get(word)
    if type_ is None:
        raise InvalidInput(f"is or has a {word[:100]}, for which Iceberg has no type")
    return type_


def _lineage(type_: str) -> str:
    for order in _ORDERS:
        if type_ in order:
            return order[0]
    if type_.startswith("decimal("):
        return f"decimal(*, {scale_of(type_)})"
    return type_


def precision_of(type_: str) -> int:
    """The digits of a decimal."""
    return int(type_[len("decimal(") :].partition(",")[0])


def scale_of(type_: str) -> int:
    """The digits of a decimal after its point."""
    return int(type_.partition(",")[2].strip(" )"))


def _widest(one: SchemaField, other: SchemaField) -> SchemaField:
    """Of two fields with one id, and so one lineage, the one that holds the values of both."""
    if not (isinstance(one.type, str) and isinstance(other.type, str)):
        return other
    for order in _ORDERS:
        if one.type in order and other.type in order:
            return max(one, other, key=lambda each: order.index(str(each.type)))
    if one.type.startswith("decimal("):
        return max(one, other, key=lambda each: precision_of(str(each.type)))
    return other


def _grown(field: SchemaField, held: Mapping[int, tuple[str, SchemaField]]) -> SchemaField:
    match field.type:
        case Struct(fields):
            return replace(field, type=Struct(tuple(_grown(each, held) for each in fields)))
        case ListType(element):
            return replace(field, type=ListType(_grown(element, held)))
        case MapType(key, value):
            return replace(field, type=MapType(_grown(key, held), _grown(value, held)))
    before = held.get(field.id)
    if before is None or not isinstance(before[1].type, str):
        return field
    if _lineage(before[1].type) != _lineage(field.type):
        return field
    return replace(field, type=_widest(before[1], field).type)


def inner_of(type_: FieldType) -> tuple[SchemaField, ...]:
    """The fields right inside of a type."""
    match type_:
        case Struct(fields):
            return fields
        case ListType(element):
            return (element,)
        case MapType(key, value):
            return (key, value)
    return ()


def _every(fields: Iterable[SchemaField], before: str) -> Iterator[tuple[str, SchemaField]]:
    for each in fields:
        name = f"{before}{each.name}"
        yield name, each
        yield from _every(inner_of(each.type), f"{name}.")


def _united(one: Sequence[SchemaField], other: Sequence[SchemaField]) -> list[SchemaField]:
    """The fields of both, the first where both have one of a name, with what is inside of both."""
    found = {each.name: each for each in one}
    for each in other:
        held = found.get(each.name)
        if held is None:
            found[each.name] = each
        elif held.id == each.id:
            inner = _united(inner_of(held.type), inner_of(each.type))
            match held.type:
                case Struct():
                    found[each.name] = replace(held, type=Struct(tuple(inner)))
                case ListType():
                    found[each.name] = replace(held, type=ListType(inner[0]))
                case MapType():
                    found[each.name] = replace(held, type=MapType(inner[0], inner[1]))
    return list(found.values())


def _mapped(field: SchemaField) -> dict[str, Any]:
    said: dict[str, Any] = {"field-id": field.id, "names": [field.name]}
    inner = [_mapped(each) for each in inner_of(field.type)]
    return {**said, "fields": inner} if inner else said


def _word(type_: FieldType) -> str:
    match type_:
        case Struct():
            return "a struct"
        case ListType():
            return "a list"
        case MapType():
            return "a map"
    return type_


def _type_json(type_: FieldType) -> Any:
    match type_:
        case Struct(fields):
            return {"type": "struct", "fields": [_field_json(each) for each in fields]}
        case ListType(element):
            return {
                "type": "list",
                "element-id": element.id,
                "element": _type_json(element.type),
                "element-required": False,
            }
        case MapType(key, value):
            return {
                "type": "map",
                "key-id": key.id,
                "key": _type_json(key.type),
                "value-id": value.id,
                "value": _type_json(value.type),
                "value-required": False,
            }
    return type_


def _field_json(field: SchemaField) -> dict[str, Any]:
    said = {
        "id": field.id,
        "name": field.name,
        "required": False,
        "type": _type_json(field.type),
    }
    return {**said, "doc": field.doc} if field.doc else said


def _type_from(said: Any) -> FieldType:
    if isinstance(said, str):
        return said
    match said["type"]:
        case "struct":
            return Struct(tuple(_field_from(each) for each in said["fields"]))
        case "list":
            return ListType(SchemaField(said["element-id"], "element", _type_from(said["element"])))
    return MapType(
        SchemaField(said["key-id"], "key", _type_from(said["key"])),
        SchemaField(said["value-id"], "value", _type_from(said["value"])),
    )


def _field_from(said: Mapping[str, Any]) -> SchemaField:
    type_ = _type_from(said["type"])
    return SchemaField(said["id"], said["name"], type_, said.get("doc", ""))
