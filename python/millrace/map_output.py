"""Output of one input group or part: what a function returns, as tables, into a staged file in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from millrace.errors import ConflictError, UsageError
from millrace.map_record import GroupRecord, Groups
from millrace.volume import Writer

__all__ = ["GroupOutput", "Output", "ReturnedError", "tables"]

# Size of a row group of the output, before it is encoded, as ingest writes it.
_ROW_GROUP_BYTES = 16 << 20
# Tables that are combined into one: a function may yield a table for each row.
_SMALL_TABLES = 1_024


class ReturnedError(UsageError):
    """What a function returned is no table."""


def tables(returned: Any, *, takes_rows: bool = False) -> Iterator[Any]:
    """The tables of what a function returned: itself, or one after the other of an iterator.

    :param takes_rows: a dictionary without columns is one row, as reduce functions return it.
    """
    import pyarrow

    if returned is None:
        return
    one = _table(returned, takes_rows)
    if one is not None:
        yield one
        return
    if not isinstance(returned, (Iterable, pyarrow.RecordBatchReader)) or isinstance(returned, (str, bytes)):
        raise _refused(returned)
    for part in returned:
        if part is None:
            continue
        table = _table(part, takes_rows)
        if table is None:
            raise _refused(part)
        yield table


def _table(value: Any, takes_rows: bool) -> Any:
    import pyarrow

    if isinstance(value, pyarrow.Table):
        return value
    if isinstance(value, pyarrow.RecordBatch):
        return pyarrow.Table.from_batches([value])
    if isinstance(value, Mapping):
        if takes_rows:
            single = [name for name, item in value.items() if not _is_column(item)]
            if len(single) == len(value):
                return pyarrow.table({name: [_scalar(item)] for name, item in value.items()})
            if single:
                several = next(name for name in value if name not in single)
                raise ReturnedError(
                    f"the function returned one value for {single[0]!r} and several for {several!r}; return single values "
                    f"only for one row, or a list for each column with a value for each row"
                )
        return pyarrow.table({name: _column(name, column) for name, column in value.items()})
    if isinstance(value, pyarrow.RecordBatchReader):
        return None
    if type(value).__module__.partition(".")[0] == "pandas":
        return _frame(value)
    if hasattr(value, "__arrow_c_stream__"):
        return pyarrow.table(value)
    return None


def _frame(frame: Any) -> Any:
    """A table of a pandas data frame, with the levels of its index that have a name, such as the keys of a group."""
    import pyarrow

    if not hasattr(frame, "columns"):
        raise _refused(frame)
    named = [name for name in frame.index.names if name is not None and name not in frame.columns]
    frame = frame.reset_index(level=named) if named else frame
    return pyarrow.Table.from_pandas(frame, preserve_index=False)


def _is_column(value: Any) -> bool:
    """Whether a value of a dictionary has a length, and is neither a text nor bytes."""
    if isinstance(value, (str, bytes, bytearray)) or getattr(value, "ndim", 1) == 0:
        return False
    return hasattr(value, "__len__") or hasattr(value, "__arrow_c_array__") or hasattr(value, "__arrow_c_stream__")


def _scalar(value: Any) -> Any:
    if getattr(value, "ndim", None) != 0 or not hasattr(value, "item"):
        return value
    # As a Python object, a time in nanoseconds is an integer.
    return value if getattr(value.dtype, "kind", "") in ("M", "m") else value.item()


def _column(name: Any, column: Any) -> Any:
    """A column for Arrow; rows that are arrays become lists of a fixed size."""
    import pyarrow

    # Arrow would take their characters, bytes or keys for the rows.
    if isinstance(column, (str, bytes, bytearray, Mapping, Set)):
        raise ReturnedError(
            f"the function returned column {name!r} as one {type(column).__name__}; a dictionary holds columns: return a "
            f"list or array with a value for each row"
        )
    if hasattr(column, "detach"):
        column = column.detach().cpu().numpy()
    shape = getattr(column, "shape", ())
    if len(shape) < 2:
        return column
    array = pyarrow.array(column.reshape(-1))
    for width in reversed(shape[1:]):
        array = pyarrow.FixedSizeListArray.from_arrays(array, width)
    return array


def _refused(value: Any) -> ReturnedError:
    kind = type(value)
    return ReturnedError(
        f"the function returned {kind.__module__}.{kind.__qualname__}; return a pyarrow.Table or RecordBatch, a dictionary "
        f"of columns, a data frame, an iterator of these, or None"
    )


class Output:
    """The output of an input group or a part while it is written. Nothing is visible before it is finished."""

    def __init__(self, groups: Groups, group: int) -> None:
        self._groups = groups
        self._group = group
        self._file: Writer | None = None
        self._schema: Any = None
        # Tables of the next row group, and after them those that are still to be combined.
        self._tables: list[Any] = []
        self._small: list[Any] = []
        self._bytes = 0
        self._rows = 0

    def _begin(self, file: Writer, schema: Any) -> None:
        """Begins the file, before the first rows."""
        raise NotImplementedError

    def _encode(self, table: Any) -> None:
        """Writes the next rows."""
        raise NotImplementedError

    def _end(self) -> None:
        """Ends the file, after the last rows."""
        raise NotImplementedError

    def _adapt(self, table: Any) -> Any:
        """The table as it is written."""
        return table

    def write(self, table: Any) -> None:
        """Adds rows. All tables of a job have the same columns."""
        if table.num_rows == 0:
            return
        table = self._adapt(table)
        if self._schema is None:
            self._open(table.schema)
        if not table.schema.equals(self._schema):
            raise ConflictError(
                f"the function returned tables with different columns: {_difference(table.schema, self._schema)}"
            )
        self._rows += table.num_rows
        # Rows of one size each, so that a large table is encoded piece by piece.
        size = table.nbytes
        rows = max(1, table.num_rows * _ROW_GROUP_BYTES // max(1, size))
        is_whole = rows >= table.num_rows
        for first in range(0, table.num_rows, rows):
            piece = table if is_whole else table.slice(first, rows)
            self._small.append(piece)
            self._bytes += size if is_whole else piece.nbytes
            if len(self._small) >= _SMALL_TABLES:
                self._combine()
            if self._bytes >= _ROW_GROUP_BYTES:
                self._flush()

    def finish(self, rows_read: int, keys: int = 0) -> bool:
        """Publishes the file and records the group; returns whether another process has not done so before."""
        if self._file is None:
            return self._groups.finish(self._group, GroupRecord(rows_read, 0, 0, None, keys), None)
        self._flush()
        self._end()
        self._file.close()
        path = self._groups.file_of(self._group)
        record = GroupRecord(rows_read, self._rows, self._file._written, path.rpartition("/")[2], keys)
        return self._groups.finish(self._group, record, self._file)

    def discard(self) -> None:
        """Gives up what was written."""
        if self._file is not None:
            self._file.discard()

    def _open(self, schema: Any) -> None:
        import pyarrow

        if not schema.names:
            raise UsageError("the function returned a table without columns")
        twice = [name for name in schema.names if schema.names.count(name) > 1]
        if twice:
            raise UsageError(f"the function returned a table with two columns {twice[0]!r}")
        first, agreed = self._groups.agree_on_schema(self._group, schema.serialize().to_pybytes())
        agreed = pyarrow.ipc.read_schema(pyarrow.py_buffer(agreed))
        if not schema.equals(agreed):
            raise ConflictError(
                f"its output has other columns than that of {self._groups.noun} {first}: {_difference(schema, agreed)}; give columns "
                f"a type in the function, for example by pyarrow.table(..., schema=...)"
            )
        self._schema = agreed
        self._file = self._groups.stage(self._group)
        self._begin(self._file, agreed)

    def _combine(self) -> None:
        """Makes one table of small ones: a table of one row takes a thousand times its bytes."""
        import pyarrow

        small, self._small = self._small, []
        try:
            self._tables.append(pyarrow.concat_tables(small).combine_chunks())
        except pyarrow.ArrowException:
            # Not for every type: nested dictionaries stay as they are.
            self._tables += small

    def _flush(self) -> None:
        import pyarrow

        self._tables += self._small
        self._small = []
        if not self._tables:
            return
        table = pyarrow.concat_tables(self._tables).replace_schema_metadata(self._schema.metadata)
        self._tables, self._bytes = [], 0
        self._encode(table)


class GroupOutput(Output):
    """Output as a Parquet file with row groups of about 16 MiB."""

    def __init__(self, groups: Groups, group: int) -> None:
        super().__init__(groups, group)
        self._parquet: Any = None

    def discard(self) -> None:
        if self._parquet is not None:
            # Else its end would write a footer.
            self._parquet.is_open = False
        super().discard()

    def _begin(self, file: Writer, schema: Any) -> None:
        import pyarrow
        import pyarrow.parquet

        try:
            self._parquet = pyarrow.parquet.ParquetWriter(file, schema, compression="zstd")
        except (pyarrow.ArrowException, NotImplementedError) as error:
            raise UsageError(f"the function returned a table that Parquet has no form for: {error}") from error

    def _encode(self, table: Any) -> None:
        import pyarrow

        try:
            self._parquet.write_table(table, row_group_size=table.num_rows)
        except (pyarrow.ArrowException, NotImplementedError) as error:
            raise UsageError(f"the function returned a table that Parquet has no form for: {error}") from error

    def _end(self) -> None:
        self._parquet.close()


def _difference(schema: Any, agreed: Any) -> str:
    """The first column in which two schemas differ."""
    for name in agreed.names:
        if name not in schema.names:
            return f"column {name!r} is missing"
    for name in schema.names:
        if name not in agreed.names:
            return f"column {name!r} is new"
    for found, expected in zip(schema, agreed):
        if found.name != expected.name:
            return f"column {found.name!r} stands where column {expected.name!r} stood"
        if not found.equals(expected):
            null = "" if found.nullable == expected.nullable else " (one of them cannot be null)"
            return f"column {found.name!r} is {found.type} and was {expected.type}{null}"
    return "their metadata differ"
