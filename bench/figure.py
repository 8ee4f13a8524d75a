"""How every measurement here prints its results: one JSON line per figure, alone on stdout."""

from __future__ import annotations

import json
import os
from typing import Any


def emit(figure: str, value: float, unit: str, *, limit: float | None = None, **facts: Any) -> bool:
    """Prints one figure; returns whether it is within its limit.

    Args:
        limit: the most that is promised, in the same unit.
        facts: how it was measured.
    """
    line = {"figure": figure, "value": round(value, 4), "unit": unit}
    if limit is not None:
        line["limit"] = limit
    print(json.dumps({**line, "cores": len(os.sched_getaffinity(0)), **facts}), flush=True)
    return limit is None or value <= limit
