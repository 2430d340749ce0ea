"""Bodies of limited size, clients that hang up, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.serving.protocol import ApiError
from jaxllm.serving.worker import Answer

_GONE = 499  # nginx's number for a client that did not wait; nobody reads it.
_DISCARDED = 16  # Times the limit that is read and thrown away, so that the client sees the reply.


async def read_body(request: HttpRequest, limit: int) -> bytes:
    """The body of a request.

    Raises:
      ApiError: 413 where it has more than `limit` bytes; no more than these are kept.
    """
    refusal = ApiError(413, f"the body has more than {limit} bytes, the most that is taken.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > _DISCARDED * limit:
        raise refusal
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            parts.append(part)
            if size > limit:
                parts.clear()
            if size > _DISCARDED * limit:
                break
    except ClientDisconnect as error:
        raise ApiError(_GONE, "the client hung up.") from error
    if size > limit:
        raise refusal
    return b"".join(parts)


async def unless_gone(request: HttpRequest, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that some work makes; the work is cancelled if the client hangs up."""
    response = await _race(request.receive, work)
    return Response(status_code=_GONE) if response is None else response


async def _race(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """What the work returns, or None if the client hangs up first."""

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """Sends objects as server-sent events, and [DONE] after the last; then leaves `held`."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[Any, None], held: contextlib.AbstractContextManager[Any]
    ) -> None:
        self._events = events
        self._held = held
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ends early, and closes the events, when the client hangs up."""
        with self._held:
            await _race(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async def say(data: str) -> None:
            part = f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": part, "more_body": True})

        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for event in events:
                    await say(json.dumps(event))
            except ApiError as error:
                await say(json.dumps(error.body()))
            await say("[DONE]")
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, bool], None]:
    """(which answer has something new, whether that is its end), until all have ended."""
    waiting = {asyncio.ensure_future(answer.updated()): i for i, answer in enumerate(answers)}
    try:
        while waiting:
            ready, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in ready:
                index = waiting.pop(task)
                # Asked once: the engine goes on in its thread.
                ended = answers[index].handle.done
                if not ended:
                    waiting[asyncio.ensure_future(answers[index].updated())] = index
                yield index, ended
    finally:
        for task in waiting:
            task.cancel()
