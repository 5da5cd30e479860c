"""Coroutines run from synchronous code, and many of them at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")

AT_ONCE = 64
"""Most items under way in `map_bounded`, to bound the memory in flight."""


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine by `asyncio.run`, in a new thread if this one already runs an event loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    results: list[T] = []
    failures: list[BaseException] = []

    def target() -> None:
        try:
            results.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failures.append(error)

    thread = threading.Thread(target=target, name="dcp_s3-catalog")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


async def gather(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """All results in order. When one fails, the others are cancelled and end before its error is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def map_bounded(function: Callable[[T], Awaitable[U]], items: Sequence[T], *, limit: int = AT_ONCE) -> list[U]:
    """Results of ``function`` for all items, in order; at most ``limit`` at a time. Failures as in `gather`."""
    results: dict[int, U] = {}
    pending = iter(enumerate(items))

    async def work() -> None:
        for number, item in pending:
            results[number] = await function(item)

    await gather(work() for _ in range(min(limit, len(items))))
    return [results[number] for number in range(len(items))]
