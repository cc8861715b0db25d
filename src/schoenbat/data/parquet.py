"""Columns of Parquet files, with pyarrow, which loads when a file is read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schoenbat.data.errors import DataError

INSTALL = "Parquet files need pyarrow; install it with: pip install '.[cli]' in a checkout"


def read_columns(path: Path, columns: Sequence[str]) -> list[list[Any]]:
    """The values of some columns, without missing ones."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise RuntimeError(INSTALL) from None
    try:
        with parquet.ParquetFile(path) as file:
            present = file.schema_arrow.names
            missing = [name for name in columns if name not in present]
            if missing:
                raise DataError(
                    f"{path} lacks the columns {', '.join(missing)}; it has {', '.join(present)}. "
                    "Is it another file under this name?"
                )
            table = file.read(columns=list(columns))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is no complete Parquet file ({error}); get it again") from error
    for name in columns:
        if table[name].null_count:
            raise DataError(f"column {name} of {path} has {table[name].null_count} missing values")
    return [table[name].to_pylist() for name in columns]
