"""The traffic against a stand-in for the router, which answers, refuses, hangs or is not there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvctl.demo.prompts import Visit
from kvctl.demo.traffic import FAILURES, Exchange, RequestError, ask, send_all

COMPLETION = {
    "choices": [
        {
            "text": "",
            "logprobs": {
                "tokens": ["token_id:7", "token_id:250"],
                "token_logprobs": [-0.5, -1.5],
                "top_logprobs": [
                    {"token_id:7": -0.5, "token_id:3": -1.0},
                    {"token_id:250": -1.5, "token_id:251": -1.5001},
                ],
            },
        }
    ]
}


@contextmanager
def router(answer: Callable[[dict[str, Any], BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer(json.loads(body), self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def reply(handler: BaseHTTPRequestHandler, status: int, content: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def test_an_answer_is_parsed_into_ids_and_logprobs() -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any], handler: BaseHTTPRequestHandler) -> None:
        asked.append(body)
        reply(handler, 200, json.dumps(COMPLETION).encode())

    with router(answer) as url:
        found = ask(url, [1, 2, 3], model="tiny", deadline=10)
    assert found.tokens == (7, 250)
    assert found.logprobs == (-0.5, -1.5)
    assert found.top[1] == {250: -1.5, 251: -1.5001}
    assert asked[0]["prompt"] == [1, 2, 3]
    assert asked[0]["model"] == "tiny"
    assert asked[0]["temperature"] == 0
    assert asked[0]["return_tokens_as_token_ids"] is True


@pytest.mark.parametrize(
    ("status", "content", "says"),
    [
        (500, b'{"error": "no worker"}', "HTTP 500.*no worker"),
        (503, b"", "HTTP 503"),
        (200, b"not json", "another form"),
        (200, b'{"choices": []}', "another form"),
        (200, json.dumps(COMPLETION).replace("token_id:", "").encode(), "not a token id"),
    ],
)
def test_a_wrong_answer_says_what_came(status: int, content: bytes, says: str) -> None:
    with (
        router(lambda _, handler: reply(handler, status, content)) as url,
        pytest.raises(RequestError, match=says),
    ):
        ask(url, [1], model="tiny", deadline=10)


def test_a_router_that_is_gone_is_a_failed_request() -> None:
    with router(lambda *_: None) as url:
        pass
    with pytest.raises(RequestError, match="no answer"):
        ask(url, [1], model="tiny", deadline=10)


def test_a_request_that_hangs_ends_at_its_deadline() -> None:
    release = threading.Event()
    with router(lambda *_: release.wait(30) and None) as url:
        with pytest.raises(RequestError, match=r"within 0\.2 s"):
            ask(url, [1], model="tiny", deadline=0.2)
        release.set()


def test_an_answer_that_trickles_in_for_ever_ends_at_its_deadline() -> None:
    stop = threading.Event()

    def trickle(_: Any, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not stop.wait(0.01):
            try:
                handler.wfile.write(b" ")
            except OSError:
                return

    with router(trickle) as url:
        with pytest.raises(RequestError, match="within"):
            ask(url, [1], model="tiny", deadline=0.2)
        stop.set()


def test_every_visit_is_sent_once_and_failures_do_not_stop_the_others() -> None:
    def answer(body: dict[str, Any], handler: BaseHTTPRequestHandler) -> None:
        failed = body["prompt"] == [1]
        reply(handler, 500 if failed else 200, json.dumps(COMPLETION).encode())

    visits = [Visit(0, False), Visit(1, False), Visit(2, False), Visit(0, True)]
    seen: list[Exchange] = []
    with router(answer) as url:
        exchanges = send_all(
            visits,
            [[0], [1], [2]],
            url=url,
            model="tiny",
            clients=2,
            deadline=10,
            on_done=seen.append,
        )
    assert exchanges == seen
    assert sorted((each.visit.prompt, each.visit.again) for each in exchanges) == [
        (0, False), (0, True), (1, False), (2, False),
    ]  # fmt: skip
    assert [each.visit.prompt for each in exchanges if each.failure] == [1]


def test_after_some_failures_the_rest_is_not_sent() -> None:
    with router(lambda _, handler: reply(handler, 503, b"")) as url:
        exchanges = send_all(
            [Visit(0, False)] * 50,
            [[0]],
            url=url,
            model="tiny",
            clients=2,
            deadline=10,
            on_done=lambda _: None,
        )
    # The other client's may have been under way when the last of them failed.
    assert FAILURES <= len(exchanges) <= FAILURES + 1
    assert all(each.failure == "HTTP 503: " for each in exchanges)
