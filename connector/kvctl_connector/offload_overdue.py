"""A load of an offload child that nobody waits for any more: its request goes on without it.

OffloadingConnector's scheduler half keeps a request's jobs in the request's state, and asserts that
no load is among them when the request is queried again or stores (offloading/scheduler.py 0.30.0 to
0.33.0: ``update_state_after_alloc``, ``_build_store_jobs``). The load cannot be taken back: its
worker may be in the middle of it. So it is moved to a state of its own, under a name that no
request has, which leaves as that of an aborted request does: when the job has ended.
"""

from __future__ import annotations

from copy import copy
from typing import Any

_STATE = ("transfer_jobs", "finished_signaled", "group_states", "req")


class _Gone:
    """In the place of the request in the load's own state."""

    def is_finished(self) -> bool:
        return True  # so a reset of the cache forgets the state


def let_go(child: Any, request: str) -> bool:
    """Takes a request's load out of an offload child's state of the request.

    `child`: scheduler role. To be called between two steps' metadata, when the load has been given
    to the workers.

    Returns:
        False: this child, or this release of it, cannot; nothing was changed.
    """
    scheduler = getattr(child, "connector_scheduler", None)
    states: Any = getattr(scheduler, "_req_status", {})
    jobs: Any = getattr(scheduler, "_jobs", None)
    state: Any = states.get(request)
    if jobs is None or not all(hasattr(state, name) for name in _STATE):
        return False
    loads = {number for number in state.transfer_jobs if not jobs[number].is_store}
    for number in loads:
        alone = copy(state)
        alone.req = _Gone()
        alone.transfer_jobs = {number}
        alone.finished_signaled = True
        # The request's own groups forget blocks that are given to others; these hold none.
        alone.group_states = tuple(type(group)() for group in state.group_states)
        name = f"{request}, load {number}"
        states[name] = alone
        jobs[number].req_id = name
    state.transfer_jobs -= loads
    return True
