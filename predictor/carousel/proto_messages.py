"""Protocol buffers' messages declared at run time, for protocols whose generated modules cannot be had.

A process holds one generated copy of a package only, and copies come with whole frameworks. On the wire field numbers
count alone, so messages declared here talk to any of them. Needs protobuf and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

__all__ = ["Fields", "declare"]

Fields = tuple[tuple[str, int, str], ...]
"""A message's fields: name, number and type.

A type is a scalar's, the name of another message of the package, or ``.`` and the full name of a dependency's. ``*``
after it repeats, ``%`` makes it a map's whose keys are strings.
"""

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _FIELD.TYPE_BOOL,
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint64": _FIELD.TYPE_UINT64,
    "double": _FIELD.TYPE_DOUBLE,
}


def declare(
    package: str,
    messages: Mapping[str, Fields],
    *,
    pool: Any = None,
    dependencies: Sequence[str] = (),
    one_of: Collection[str] = (),
) -> dict[str, Any]:
    """The messages' classes, by name.

    Args:
        package: their package, which ``pool`` must not hold yet.
        messages: their fields.
        pool: the ``DescriptorPool`` to declare them in; None is one of their own.
        dependencies: files in ``pool`` whose messages are fields' types.
        one_of: messages of which each has one of its fields at most.
    """
    pool = descriptor_pool.DescriptorPool() if pool is None else pool
    path = f"{package.replace('.', '/')}.proto"
    file = descriptor_pb2.FileDescriptorProto(name=path, package=package, syntax="proto3", dependency=dependencies)
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        if name in one_of:
            message.oneof_decl.add(name="choice")
        for field, number, kind in fields:
            declared = message.field.add(name=field, number=number)
            _set_type(declared, package, kind)
            if name in one_of:
                declared.oneof_index = 0
            if kind.endswith("%"):
                _make_map(message, declared, package)
    pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}


def _set_type(field: Any, package: str, kind: str) -> None:
    base = kind.rstrip("*%")
    field.label = _FIELD.LABEL_OPTIONAL if base == kind else _FIELD.LABEL_REPEATED
    if base in _SCALARS:
        field.type = _SCALARS[base]
    else:
        field.type = _FIELD.TYPE_MESSAGE
        field.type_name = base if base.startswith(".") else f".{package}.{base}"


def _make_map(message: Any, field: Any, package: str) -> None:
    """A map is a repeated message of keys and values, whose name follows from the field's."""
    entry = message.nested_type.add(
        name="".join(word[0].upper() + word[1:] for word in field.name.split("_")) + "Entry"
    )
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_FIELD.LABEL_OPTIONAL, type=_FIELD.TYPE_STRING)
    value = entry.field.add(name="value", number=2, label=_FIELD.LABEL_OPTIONAL, type=field.type)
    if field.type == _FIELD.TYPE_MESSAGE:
        value.type_name = field.type_name
    field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{package}.{message.name}.{entry.name}"
