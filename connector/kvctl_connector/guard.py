"""Hooks into the engine never raise into it.

A hook that fails is counted, and its first failure is logged with a traceback; the engine goes
on as if the hook were not there.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger("vllm.kvctl")  # below vLLM's logger, so it has vLLM's format and level

Function = TypeVar("Function", bound=Callable[..., Any])
failures: dict[str, int] = {}  # hook -> how often it failed in this process; bounded by the hooks


def guarded(function: Function) -> Function:
    """The function, but any exception is counted and logged once, and None is returned."""
    name = function.__qualname__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception:
            first = name not in failures
            failures[name] = failures.get(name, 0) + 1
            if first:
                logger.exception("kvctl: %s failed; it is skipped, further failures counted", name)
            return None

    return call  # type: ignore[return-value]


class Proxy:
    """An object of vLLM's behind which some methods are watched.

    Everything not named in `watched` goes to the original untouched. No lock: several threads
    use the same NIXL wrapper.
    """

    def __init__(self, original: Any, watched: dict[str, Callable[..., Any]]) -> None:
        self._kvctl_original = original
        self.__dict__.update(watched)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kvctl_original, name)


def shadow(target: Any, name: str, before: Callable[..., None]) -> bool:
    """Calls `before` with the arguments of each call of ``target.name``; False if it has none.

    An instance attribute stands in front of the method; vLLM calls these as ``self.name(…)``.
    """
    original = getattr(target, name, None)
    if not callable(original):
        return False
    watch = guarded(before)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        watch(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(target, name, call)
    return True
