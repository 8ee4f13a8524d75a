"""Tables that never grow: what requests leave behind is forgotten, the oldest first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


def trim(table: OrderedDict[Any, Any], limit: int) -> None:
    """Drops the oldest entries until the table holds `limit` at most."""
    while len(table) > limit:
        table.popitem(last=False)
