"""Sends the demo's prompts through the router, as a client would."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvctl.demo.compare import Answer
from kvctl.demo.prompts import Visit
from kvctl.demo.reference import MAX_TOKENS, TOP

FAILURES = 3  # requests that fail before the rest is not sent: the demo has failed by then
_TOKEN = "token_id:"
_CHUNK = 64 * 1024


class RequestError(Exception):
    """A request got no answer, and why."""


@dataclass(frozen=True)
class Exchange:
    """One request and what came of it: an answer, or a failure.

    Attributes:
        seconds: from sending to the last byte of the answer.
        failure: why there is no answer; None when there is one.
    """

    visit: Visit
    seconds: float
    answer: Answer | None
    failure: str | None


def send_all(
    visits: Sequence[Visit],
    prompts: Sequence[Sequence[int]],
    *,
    url: str,
    model: str,
    clients: int,
    deadline: float,
    on_done: Callable[[Exchange], None],
) -> list[Exchange]:
    """Sends the requests, in order, `clients` at a time; gives up after `FAILURES` that failed.

    Args:
        url: of the router.
        deadline: seconds that each request has.
        on_done: called after each, from this thread.

    Returns:
        One exchange a request that was sent, in the order in which they ended.
    """
    waiting: queue.SimpleQueue[Visit] = queue.SimpleQueue()
    done: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()  # None: a client has ended
    for visit in visits:
        waiting.put(visit)

    failed: list[Exchange] = []

    def client() -> None:
        with contextlib.suppress(queue.Empty):
            while len(failed) < FAILURES:
                visit = waiting.get_nowait()
                exchange = _exchange(visit, prompts[visit.prompt], url, model, deadline)
                if exchange.failure is not None:
                    failed.append(exchange)
                done.put(exchange)
        done.put(None)

    for _ in range(clients):
        # Daemons: Ctrl-C must not wait for a request that hangs until its deadline.
        threading.Thread(target=client, daemon=True).start()
    exchanges: list[Exchange] = []
    while clients:
        exchange = done.get()
        if exchange is None:
            clients -= 1
        else:
            exchanges.append(exchange)
            on_done(exchange)
    return exchanges


def _exchange(
    visit: Visit, prompt: Sequence[int], url: str, model: str, deadline: float
) -> Exchange:
    began = time.monotonic()
    answer, failure = None, None
    try:
        answer = ask(url, prompt, model=model, deadline=deadline)
    except RequestError as error:
        failure = str(error)
    return Exchange(visit, time.monotonic() - began, answer, failure)


def ask(url: str, prompt: Sequence[int], *, model: str, deadline: float) -> Answer:
    """One completion, greedy, with logprobs.

    Args:
        deadline: seconds until the last byte of the answer.

    Raises:
        RequestError: refused, failed, late, or not in the form that was asked for.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": TOP,
        # Several of the byte tokens have the same text, which would collide as keys.
        "return_tokens_as_token_ids": True,
    }
    try:
        status, content = _post(f"{url}/v1/completions", json.dumps(body), deadline)
    except TimeoutError:
        raise RequestError(f"no answer within {deadline:.3g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(f"no answer: {error or type(error).__name__}") from error
    if status != http.HTTPStatus.OK:
        raise RequestError(f"HTTP {status}: {content.decode(errors='replace').strip()[:300]}")
    try:
        return parse(json.loads(content))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise RequestError(f"an answer in another form than asked for: {error!r}") from error


def _post(url: str, body: str, deadline: float) -> tuple[int, bytes]:
    """Status and content; TimeoutError when the last byte is not there in time."""
    target = urllib.parse.urlsplit(url)
    end = time.monotonic() + deadline
    connection = http.client.HTTPConnection(target.netloc, timeout=deadline)
    try:
        connection.request("POST", target.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = b""
        # A timeout of the socket holds for one read; a body in many pieces needs a clock.
        while chunk := response.read1(_CHUNK):
            content += chunk
            if time.monotonic() > end:
                raise TimeoutError
        return response.status, content
    finally:
        connection.close()


def parse(completion: dict[str, Any]) -> Answer:
    """Token ids and logprobs of a completion of the OpenAI form.

    Raises:
        ValueError, KeyError, TypeError, IndexError: it has another form.
    """
    logprobs = completion["choices"][0]["logprobs"]
    tokens = tuple(_token_id(text) for text in logprobs["tokens"])
    chosen = tuple(float(value) for value in logprobs["token_logprobs"])
    top = tuple(
        {**{_token_id(text): float(value) for text, value in position.items()}, token: logprob}
        for position, token, logprob in zip(logprobs["top_logprobs"], tokens, chosen, strict=True)
    )
    return Answer(tokens, chosen, top)


def _token_id(text: str) -> int:
    if not text.startswith(_TOKEN):
        raise ValueError(f"{text!r} is not a token id: the engine ignored the request for ids")
    return int(text.removeprefix(_TOKEN))
