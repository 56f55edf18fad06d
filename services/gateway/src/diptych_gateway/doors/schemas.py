"""JSON schemas of the types of bodies and answers, for the OpenAPI document.

`msgspec.json.schema_components` would do, but for two things: defaults that are raw JSON, which
bodies have, and unions of objects that are only ever written.
"""

import types
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin

import msgspec

Schema = dict[str, Any]

_REF = "#/components/schemas/"
_SIMPLE: dict[Any, Schema] = {
    Any: {},
    object: {},
    msgspec.Raw: {},
    None: {"type": "null"},
    type(None): {"type": "null"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
}


def ref(kind: type) -> Schema:
    """Where the schema of `kind` stands."""
    return {"$ref": f"{_REF}{_name(kind)}"}


def components(kinds: Iterable[type[msgspec.Struct]]) -> dict[str, Schema]:
    """The schemas of `kinds` and of what they are made of, by name.

    Raises:
        ValueError: two types have one name.
        TypeError: a type has no schema here.
    """
    found: dict[str, tuple[type, Schema]] = {}
    for kind in kinds:
        _struct(kind, found)
    return {name: schema for name, (_, schema) in sorted(found.items())}


def _name(kind: type) -> str:
    return kind.__name__.lstrip("_")


def _of(kind: Any, found: dict[str, tuple[type, Schema]]) -> Schema:
    """The schema of `kind`; objects are put into `found`, and referred to."""
    if kind in _SIMPLE:
        return dict(_SIMPLE[kind])
    if isinstance(kind, NewType):
        return _of(kind.__supertype__, found)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct(kind, found)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    return _composed(kind, found)


def _composed(kind: Any, found: dict[str, tuple[type, Schema]]) -> Schema:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _of(args[0], found)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        # Raw JSON beside a type is that type, written ahead of time.
        some = [_of(arg, found) for arg in args if arg not in (msgspec.UnsetType, msgspec.Raw)]
        return some[0] if len(some) == 1 else {"anyOf": some}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(args[1], found)}
    if origin in (list, Sequence) or args[1:] == (...,):
        return {"type": "array", "items": _of(args[0], found)}
    if origin is tuple:
        items = [_of(arg, found) for arg in args if arg != ()]
        return {"type": "array", "maxItems": len(items)} | ({"prefixItems": items} if items else {})
    raise TypeError(f"no JSON schema for {kind}")


def _struct(cls: type[msgspec.Struct], found: dict[str, tuple[type, Schema]]) -> Schema:
    name = _name(cls)
    known, _ = found.get(name, (cls, {}))
    if known is not cls:
        raise ValueError(f"two types are called {name}: {known} and {cls}")
    if name in found:
        return ref(cls)
    schema: Schema = {"type": "object"}
    found[name] = (cls, schema)
    fields = msgspec.structs.fields(cls)
    config = cls.__struct_config__
    tag: Schema = {} if config.tag is None else {str(config.tag_field): {"const": config.tag}}
    schema["properties"] = tag | {field.encode_name: _of(field.type, found) for field in fields}
    required = [*tag, *(field.encode_name for field in fields if field.required)]
    if required:
        schema["required"] = required
    if config.forbid_unknown_fields:
        schema["additionalProperties"] = False
    return ref(cls)
