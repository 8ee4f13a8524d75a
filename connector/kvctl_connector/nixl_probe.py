"""Watches every NIXL transfer of one worker, through the NIXL wrapper object.

The wrapper (``connector_worker.nixl_wrapper``) is set in the worker's constructor and looked up
by name for each call, in all vLLM releases from 0.20.2 to 0.33.0, so a delegating proxy in its
place sees all transfers: prepared, posted, polled, released. The request is no argument of these
calls; it comes from the keywords of ``_read_blocks``, which surrounds them on the same thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .bounded import trim
from .facts import Fact
from .guard import Proxy, guarded, shadow
from .lease import Grace
from .pull_failures import UNFIT

LIMIT = 65_536  # pulls and handles remembered; far above what one worker has in flight

# _log_failure's failure types (NIXL/base_worker.py 0.32.0) -> phase and reason of semconv.
_FAILURES = {
    "handshake_setup_failed": ("handshake", "setup_failed"),
    "handshake_failed": ("handshake", "handshake_refused"),
    "notification_failed": ("notify", "notify_failed"),
    "transfer_setup_failed": ("post", "setup_failed"),
    "transfer_failed": ("move", "transfer_error"),
    "transfer_exception": ("move", "transfer_error"),
    UNFIT: ("post", "offer_mismatch"),
}


@dataclass
class _Handle:
    """One posted descriptor list. Times are Unix ns, 0: not yet."""

    pull: _Pull
    posted: int = 0
    done: int = 0


@dataclass
class _Pull:
    """What is known of one request's pull on this rank."""

    peer: str = ""
    posted: int = 0
    bytes: int = 0
    failure: tuple[str, str] | None = None
    handles: list[_Handle] = field(default_factory=list)

    @property
    def completed(self) -> int:
        """When the last handle was done."""
        return max((handle.done for handle in self.handles), default=0)


@dataclass
class NixlProbe:
    """The pulls and sends of one worker, and the hooks that fill them.

    Attributes:
        rank, ranks: of this worker, and how many report each transfer.
        heartbeat_sent: told of each heartbeat that was posted, and when (Unix ns).
        gives_grace: an expired lease gets a second look, see `Grace`.
        missing: hooks that the installed vLLM does not have.
    """

    rank: int
    ranks: int
    heartbeat_sent: Callable[[bytes, int], None] = lambda message, sent: None
    gives_grace: bool = True
    missing: list[str] = field(default_factory=list)
    _pulls: OrderedDict[str, _Pull] = field(default_factory=OrderedDict)
    _handles: OrderedDict[int, _Handle] = field(default_factory=OrderedDict)
    _current: _Pull | None = None
    _read: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def install(self, worker: Any) -> None:
        """Puts the probe between a NIXL worker and its wrapper, before caches are registered."""
        wrapper = getattr(worker, "nixl_wrapper", None)
        if wrapper is None:
            self.missing.append("nixl_wrapper")
            return
        worker.nixl_wrapper = Proxy(
            wrapper,
            {
                "make_prepped_xfer": self._watch_make(wrapper.make_prepped_xfer),
                "transfer": self._watch_transfer(wrapper.transfer),
                "check_xfer_state": self._watch_state(wrapper.check_xfer_state),
                "get_xfer_telemetry": self._watch_telemetry(wrapper.get_xfer_telemetry),
                "release_xfer_handle": self._watch_release(wrapper.release_xfer_handle),
                "get_new_notifs": self._watch_notifs(
                    wrapper.get_new_notifs, self._grace_of(worker)
                ),
                "send_notif": self._watch_send(wrapper.send_notif),
            },
        )
        for name, hook in (("_read_blocks", self._enter_read), ("_log_failure", self._fail)):
            if not shadow(worker, name, hook):
                self.missing.append(name)

    def received(self, request: str, *, failed: bool, late: bool = False) -> Fact:
        """The fact of a pull that vLLM has just reported as ended on this rank.

        `late`: it ended after its lease may have run out, so what it read is not used.
        """
        pull = self._pulls.pop(request, None) or _Pull()
        now = time.time_ns()
        phase, reason = "", ""
        # Up to vLLM 0.28.0 a failed pull is reported as received, and only logged as failed.
        if failed or (pull.failure is not None and pull.failure[0] != "notify"):
            failed = True
            phase, reason = pull.failure or ("move", "unknown")
        elif late:
            phase, reason = "move", "lease_expired"
        return Fact(
            rank=self.rank, ranks=self.ranks, tier="peer", direction="recv",
            key=request, request=request,
            start=pull.posted, end=pull.completed or now, bytes=pull.bytes,
            outcome="failed" if failed else "expired" if late else "ok",
            peer=pull.peer, phase=phase, reason=reason,
        )  # fmt: skip

    def sent(self, requests: Iterable[str]) -> list[Fact]:
        """The facts of offers whose blocks vLLM has just released on this rank.

        Read by the other side: ok. Released without a notification: the lease ran out. How many
        bytes were read only the reader knows.
        """
        facts = []
        for request in requests:
            read = request in self._read
            self._read.pop(request, None)
            now = time.time_ns()
            facts.append(
                Fact(
                    rank=self.rank,
                    ranks=self.ranks,
                    tier="peer",
                    direction="send",
                    key=request,
                    request=request,
                    start=0,
                    end=now,
                    bytes=0,
                    outcome="ok" if read else "expired",
                    phase="" if read else "notify",
                    reason="" if read else "lease_expired",
                )
            )
        return facts

    # The hooks. Those on the wrapper return what the original returned, whatever happens here.

    @guarded
    def _enter_read(self, *_args: Any, **names: Any) -> None:
        # _read_blocks is called with keywords in all releases.
        pull = self._pull(names["request_id"])
        pull.peer = names.get("dst_engine_id", "")
        self._current = pull

    @guarded
    def _fail(self, failure_type: str = "", req_id: str | None = None, *_: Any, **__: Any) -> None:
        # From the handshake's thread too: one assignment, no iteration.
        if req_id is not None and failure_type in _FAILURES:
            pull = self._pull(req_id)
            pull.failure = pull.failure or _FAILURES[failure_type]

    def _pull(self, request: str) -> _Pull:
        pull = self._pulls.get(request)
        if pull is None:
            pull = self._pulls[request] = _Pull()
            trim(self._pulls, LIMIT)
        return pull

    def _watch_make(self, original: Any) -> Any:
        @guarded
        def note(handle: Any) -> None:
            if self._current is not None:
                # By identity: a reference would keep an abandoned transfer alive, since the
                # handle's finalizer is what releases it.
                posted = self._handles[_key(handle)] = _Handle(self._current)
                self._current.handles.append(posted)
                trim(self._handles, LIMIT)

        def make_prepped_xfer(*args: Any, **kwargs: Any) -> Any:
            handle = original(*args, **kwargs)
            note(handle)
            return handle

        return make_prepped_xfer

    def _watch_transfer(self, original: Any) -> Any:
        @guarded
        def note(handle: Any, now: int) -> None:
            if (known := self._handles.get(_key(handle))) is not None:
                known.posted = now
                known.pull.posted = known.pull.posted or now

        def transfer(handle: Any, *args: Any, **kwargs: Any) -> Any:
            note(handle, time.time_ns())
            return original(handle, *args, **kwargs)

        return transfer

    def _watch_state(self, original: Any) -> Any:
        @guarded
        def note(handle: Any) -> None:
            known = self._handles.get(_key(handle))
            if known is not None and not known.done:
                known.done = time.time_ns()

        def check_xfer_state(handle: Any, *args: Any, **kwargs: Any) -> Any:
            state = original(handle, *args, **kwargs)
            if state != "PROC":
                note(handle)
            return state

        return check_xfer_state

    def _watch_telemetry(self, original: Any) -> Any:
        @guarded
        def note(handle: Any, telemetry: Any) -> None:
            known = self._handles.get(_key(handle))
            if known is None or telemetry is None:
                return
            known.pull.bytes += int(telemetry.totalBytes)
            # NIXL's own end of the transfer (microseconds since the post) is earlier than the
            # poll that noticed it.
            end = known.posted + int(telemetry.xferDuration) * 1000
            known.done = min(end, known.done or end)

        def get_xfer_telemetry(handle: Any, *args: Any, **kwargs: Any) -> Any:
            telemetry = original(handle, *args, **kwargs)
            note(handle, telemetry)
            return telemetry

        return get_xfer_telemetry

    def _watch_release(self, original: Any) -> Any:
        def release_xfer_handle(handle: Any, *args: Any, **kwargs: Any) -> Any:
            key = _key(handle)
            result = original(handle, *args, **kwargs)
            self._handles.pop(key, None)
            return result

        return release_xfer_handle

    def _watch_send(self, original: Any) -> Any:
        watch = guarded(self.heartbeat_sent)

        def send_notif(*args: Any, **kwargs: Any) -> Any:
            sent = time.time_ns()  # before: the lease is extended from then at least
            result = original(*args, **kwargs)
            message = kwargs.get("notif_msg", b"")
            if message.startswith(b"HB:"):
                watch(message, sent)
            return result

        return send_notif

    def _grace_of(self, worker: Any) -> Callable[[], None]:
        if not self.gives_grace:
            return lambda: None
        leases = getattr(worker, "_reqs_to_send", None)
        if not isinstance(leases, dict):
            self.missing.append("_reqs_to_send")
            return lambda: None
        return guarded(Grace(leases).notifications_read)

    def _watch_notifs(self, original: Any, then: Callable[[], None]) -> Any:
        @guarded
        def note(notifications: Any) -> None:
            for messages in notifications.values():
                for message in messages:
                    # "<request>:<consumers>" says that the blocks were read; "HB:…" is a heartbeat.
                    text = message.decode("utf-8", "replace")
                    if not text.startswith("HB:"):
                        self._read[text.rpartition(":")[0]] = None
                        trim(self._read, LIMIT)

        def get_new_notifs(*args: Any, **kwargs: Any) -> Any:
            notifications = original(*args, **kwargs)
            if notifications:
                note(notifications)
            then()
            return notifications

        return get_new_notifs


def _key(handle: Any) -> int:
    return handle if isinstance(handle, int) else id(handle)
