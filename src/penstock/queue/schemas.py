"""JSON schemas of types: what a submit is checked by, before anything is sent.

They are part of the queue's settings (`config.QueueConfig.schemas`), so all producers that have
opened the queue since agree on them. Inputs of `submit`, `submit_many`, `submit_mixed`, of batches
and of schedules, when they are added, are checked; a replay is not, nor what comes after a batch.
Workers never check: what was taken before a schema came, or by a producer of an older release, runs
as it is.

A schema refers to nothing outside of itself: no address is ever fetched. Validators are made once
for each schema and kept. The package `jsonschema-rs` is imported only where a type has a schema;
without it such a submit is refused. Pure but for that import.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

import msgspec

from penstock.kernel.errors import InvalidInput
from penstock.queue.places import check_name

SCHEMAS_MAX: Final = 100
SCHEMA_BYTES_MAX: Final = 64 * 1024
ALL_BYTES_MAX: Final = 512 * 1024
_WHY_CHARACTERS_MAX: Final = 200

Schemas = Mapping[str, msgspec.Raw]


def changed_schemas(present: Schemas, wanted: Mapping[str, object]) -> dict[str, msgspec.Raw]:
    """The schemas with these set, and those taken away that are None; or `InvalidInput`."""
    found = dict(present)
    for type_, schema in wanted.items():
        check_name(type_, what="type")
        if schema is None:
            found.pop(type_, None)
        else:
            found[type_] = _checked(type_, schema)
    if len(found) > SCHEMAS_MAX or sum(map(_size, found.values())) > ALL_BYTES_MAX:
        raise InvalidInput(
            f"A queue has at most {SCHEMAS_MAX} schemas, of {ALL_BYTES_MAX:,} bytes together."
        )
    return found


def check_inputs(schemas: Schemas, inputs: Iterable[tuple[str, str, msgspec.Raw]]) -> None:
    """Raise `InvalidInput` at the first that does not fit; each a type, its name, and its JSON."""
    if not schemas:
        return
    for type_, what, body in inputs:
        schema = schemas.get(type_)
        if schema is not None:
            _check(type_, what, body, _validator(bytes(schema)))


def _check(type_: str, what: str, body: msgspec.Raw, validator: Any) -> None:
    error = next(iter(validator.iter_errors(json.loads(bytes(body)))), None)
    if error is None:
        return
    path = "".join(f"/{each}" for each in error.instance_path)
    why = error.message[:_WHY_CHARACTERS_MAX]
    raise InvalidInput(
        f"{what} does not fit the schema of {type_!r}{f' at {path[:200]}' if path else ''}: {why}.",
        hint="'penstock queue config show' shows the schemas of a queue.",
    )


def _checked(type_: str, schema: object) -> msgspec.Raw:
    """A schema as it is stored, or `InvalidInput`."""
    try:
        body = json.dumps(schema, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        stored = body.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"The schema of {type_!r} is not JSON: {error}.") from error
    if len(stored) > SCHEMA_BYTES_MAX:
        raise InvalidInput(
            f"The schema of {type_!r} has {len(stored):,} bytes; at most {SCHEMA_BYTES_MAX:,} are"
            " taken."
        )
    package = _package()
    try:
        _validator(stored)
    except (package.ValidationError, package.ReferencingError, ValueError) as error:
        why = str(error).splitlines()[0][:_WHY_CHARACTERS_MAX]
        raise InvalidInput(
            f"What is given for {type_!r} is not a JSON schema: {why}.",
            hint="Schemas are of draft 4 to 2020-12, and refer to nothing outside of themselves.",
        ) from error
    return msgspec.Raw(stored)


@lru_cache(maxsize=SCHEMAS_MAX)
def _validator(schema: bytes) -> Any:
    return _package().validator_for(json.loads(schema), retriever=_nothing_else)


def _nothing_else(address: str) -> Any:
    raise ValueError(f"{address[:100]} is not part of it")


def _package() -> Any:
    try:
        return import_module("jsonschema_rs")
    except ModuleNotFoundError as error:
        raise InvalidInput(
            "Inputs of this type are checked by a schema, which needs the package jsonschema-rs.",
            hint="Install it with: pip install 'penstock[schemas]'",
        ) from error


def _size(schema: msgspec.Raw) -> int:
    return memoryview(schema).nbytes
