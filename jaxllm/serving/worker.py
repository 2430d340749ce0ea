"""The engine in a thread of its own; asynchronous code talks to it by a queue."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from jaxllm.inference.engine import Engine, Handle, Request

_LOGGER = logging.getLogger(__name__)


class Worker:
    """Runs an engine's steps while there are requests, and jobs between the steps.

    After a step that fails (such as for lack of memory) its requests end as cancelled, and the
    engine begins anew.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to work."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step that runs now, and waits for that."""
        self._stopping = True
        self._inbox.put(lambda: None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether requests will be answered."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, request: Request, on_update: Callable[[Handle], None]) -> Handle:
        """Queues a request that the engine has checked; `on_update` is called in the thread."""
        handle = Handle(request, on_update)
        self._inbox.put(lambda: self._engine.enqueue(handle))
        return handle

    def cancel(self, handle: Handle) -> None:
        """Cancels a request before the next step."""
        self._inbox.put(lambda: self._engine.cancel(handle))

    async def call(self, function: Callable[[], Any]) -> Any:
        """What a function returns that runs in the thread, between two steps."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(job)
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        busy = False
        while not self._stopping:
            try:
                self._work_off(wait=not busy)
                busy = self._engine.step()
            except Exception:
                _LOGGER.exception("a step of the engine failed; its requests are given up")
                self._engine.reset()
                busy = False

    def _work_off(self, wait: bool) -> None:
        try:
            self._inbox.get(block=wait)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return


class Answer:
    """One request as asynchronous code sees it; leave it with `close`."""

    def __init__(self, worker: Worker, request: Request) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.handle = worker.submit(request, self._notify)

    async def updated(self) -> None:
        """Waits until there are new tokens, or the end."""
        await self._event.wait()
        self._event.clear()

    async def finished(self) -> None:
        """Waits for the end."""
        while not self.handle.done:
            await self.updated()

    def close(self) -> None:
        """Cancels what has not finished."""
        if not self.handle.done:
            self._worker.cancel(self.handle)

    def _notify(self, handle: Handle) -> None:
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:  # The loop has been closed: nobody waits any more.
            pass
