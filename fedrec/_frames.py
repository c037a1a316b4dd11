"""Making pandas' data frames, where pandas is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedrec.exceptions import MissingDependencyError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["categories", "data_frame"]


def _pandas() -> Any:
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "Data frames need pandas, which is not installed. HINT: `pip install 'fedrec[pandas]'`."
        ) from error
    return pd


def data_frame(columns: Mapping[str, Any]) -> pd.DataFrame:
    """Return a data frame of columns, whose rows are numbered.

    Args:
        columns: Values by the name of the column.

    Raises:
        MissingDependencyError: If pandas is not installed.
    """
    return _pandas().DataFrame(dict(columns))


def categories(codes: Any, names: Sequence[str]) -> Any:
    """Return a column of names that repeat, each stored once.

    Args:
        codes: Places in `names`, one per row, integers; -1 for none.
        names: The names, without repetition.

    Raises:
        MissingDependencyError: If pandas is not installed.
    """
    return _pandas().Categorical.from_codes(codes, list(names))
