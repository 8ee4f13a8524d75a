"""The read that comes too late: what the guard of the leases is there for."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from pair import Pair, wait_for, worker_of

from kvctl.demo.compare import Comparison

LEASE = 10.0  # seconds


def late_read(pair: Pair, prompt: int) -> Comparison:
    """Stops decode's worker for longer than the lease while prefill uses the blocks again."""
    worker = worker_of(pair.record("decode-0")["pid"])
    offer = pair.offer(prompt)
    pool = ThreadPoolExecutor(1)
    os.kill(worker, signal.SIGSTOP)
    try:
        asked = pool.submit(pair.take, prompt, offer)
        # Decode's scheduler has taken the offer in time; only the read comes too late.
        wait_for(
            lambda: any(t.inflight for t in pair.seen("decode-0").transfers if t.tier == "peer"),
            "decode did not take the offer",
        )
        time.sleep(LEASE + 1)
        pair.use_up_prefills_cache()
    finally:
        os.kill(worker, signal.SIGCONT)
        pool.shutdown(wait=False)
    return asked.result(2 * LEASE + 10)
