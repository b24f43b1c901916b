"""Remove the nulls that Arrow adds to rows, and keep large Arrow tables in memory-mapped files.

Arrow gives all objects of a column the same keys, and sets the keys that an object lacks to null. So null keys are
removed from objects, at any depth. Nulls remain as values of columns and as items of lists.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

Transform = Callable[[dict[str, list[Any]]], dict[str, list[Any]]]


def without_nulls(rows: Any) -> Any:
    """Return rows whose objects have no null keys. Rows that are neither a Dataset nor a stream are unchanged.

    A Dataset removes the keys when a row is read. A stream (IterableDataset) becomes a list of its rows.
    """
    if hasattr(rows, "column_names") and not hasattr(rows, "__len__"):
        return [{name: _drop_nulls(value) for name, value in row.items()} for row in rows]
    if not hasattr(rows, "with_transform") or not hasattr(rows, "features"):
        return rows
    given = rows.format
    own = given["format_kwargs"].get("transform") if given["type"] == "custom" else None
    nested = tuple(field.name for field in rows.features.arrow_schema if _has_objects(field.type))
    if not nested or (isinstance(own, partial) and own.func is _without_nested_nulls):
        return rows
    transform = partial(_without_nested_nulls, nested, own)
    return rows.with_transform(transform, given["columns"], given["output_all_columns"])


def _without_nested_nulls(
    nested: Sequence[str], then: Transform | None, columns: dict[str, list[Any]]
) -> dict[str, list[Any]]:
    """Remove null keys from the objects in the columns `nested`, then apply `then`, the user's own transform."""
    out = {name: _drop_nulls(values) if name in nested else values for name, values in columns.items()}
    return out if then is None else then(out)


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _drop_nulls(each) for key, each in value.items() if each is not None}
    return [_drop_nulls(each) for each in value] if isinstance(value, list) else value


def _has_objects(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return True
    return pa.types.is_nested(kind) and any(_has_objects(kind.field(n).type) for n in range(kind.num_fields))


def memory_mapped_table(schema: Any, batches: Iterable[Any]) -> Any:
    """Write record batches to a temporary file, and return them as a table that is memory-mapped from it."""
    import pyarrow as pa

    handle, path = tempfile.mkstemp(suffix=".arrow")
    try:
        with os.fdopen(handle, "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return pa.ipc.open_stream(pa.memory_map(path)).read_all()
    finally:
        os.unlink(path)
