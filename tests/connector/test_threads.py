import os
import threading

from kvctl_connector.threads import move_new_threads_along


def test_threads_born_inside_follow_the_thread_that_made_them() -> None:
    cores = os.sched_getaffinity(0)
    last = {max(cores)}
    stop = threading.Event()
    older = threading.Thread(target=stop.wait, daemon=True)
    older.start()
    born = threading.Thread(target=stop.wait, daemon=True)
    try:
        with move_new_threads_along():
            born.start()  # inherits all cores
            os.sched_setaffinity(0, last)  # as vLLM's NIXL worker does, in its constructor
        assert os.sched_getaffinity(born.native_id or 0) == last
        assert os.sched_getaffinity(older.native_id or 0) == cores
    finally:
        os.sched_setaffinity(0, cores)
        stop.set()
