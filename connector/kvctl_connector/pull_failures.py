"""A pull that cannot even be posted fails its request, not the engine.

NIXL's worker asserts what an offer must be for its read: as many KV groups as here, no fewer blocks
than are to be filled (NIXL/pull_worker.py 0.32.0:471, ``_read_blocks``; worker.py 0.20.2). An offer
is client input unless it is signed, and a signed one can come from a prefill of another
configuration. The assertion ends the engine core with every request in it.
"""

from __future__ import annotations

import functools
from typing import Any

HOOK = "_read_blocks_for_req"  # counted as missing where the assertion has to stay
UNFIT = "offer_unfit"  # a failure type of ours, for the worker's _log_failure
_BOOKS = ("_failed_recv_reqs", "_invalid_block_ids", "_recving_transfers", "_log_failure")


def contain(worker: Any) -> bool:
    """Has an exception out of a read reported as that request's failed load.

    `worker`: the ``connector_worker`` of a NIXL child that pulls.

    Returns:
        False: this vLLM's worker is of another form; it is left as it is.
    """
    read = getattr(worker, HOOK, None)
    if not callable(read) or not all(hasattr(worker, name) for name in _BOOKS):
        return False

    @functools.wraps(read)
    def contained(req_id: str, meta: Any) -> None:
        try:
            read(req_id, meta)
        except Exception as error:
            worker._log_failure(
                failure_type=UNFIT,
                req_id=req_id,
                msg="kvctl: the offer does not fit this engine; its request is failed",
                error=error,
            )
            if any(meta.local_block_ids):  # else nobody waits: it was only to notify prefill
                _fail(worker, req_id, meta)

    setattr(worker, HOOK, contained)
    return True


def _fail(worker: Any, req_id: str, meta: Any) -> None:
    """As the worker itself does when a handshake fails."""
    if not worker._recving_transfers.get(req_id):  # empty: it would count as done
        worker._recving_transfers.pop(req_id, None)
    # From 0.30.0 on a failed request says it all; before, only a model of one group can be told.
    if not hasattr(worker, "_recv_failures") and len(meta.local_block_ids) == 1:
        _put(worker._invalid_block_ids, set(meta.local_block_ids[0]), many=True)
    _put(worker._failed_recv_reqs, req_id)


def _put(book: Any, entry: Any, *, many: bool = False) -> None:
    """Queues from 0.22.1 on, sets before."""
    if hasattr(book, "put"):
        book.put(entry)
    elif many:
        book.update(entry)
    else:
        book.add(entry)
