"""From a call to an HTTP answer, whole or streamed, in any shape."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inferkit.online.bodies import SamplingBody
from inferkit.online.errors import ServiceError
from inferkit.online.generation import Generation, Piece
from inferkit.online.service import Call, GenerationService
from inferkit.online.shapes import Shape, usage
from inferkit.online.sse import (
    CLIENT_CLOSED_REQUEST,
    DONE,
    ClientGone,
    EventStream,
    event,
    until_gone,
)


async def answer(
    request: Request, service: GenerationService, call: Call, body: SamplingBody, shape: Shape
) -> Response:
    """Generate, and answer as `body` asks.

    What goes wrong before the first token has a status of its own; a client that leaves ends its
    generations.

    Raises:
        ServiceError: there is no result.
    """
    generations: list[Generation] = []

    def cancel_all() -> None:
        for generation in generations:
            generation.cancel("the client is gone")

    try:
        generations += await until_gone(request, service.start(call))
        if not call.is_streamed:
            await until_gone(request, _run_all(generations))
            return JSONResponse(shape.whole(generations))
        events = _events(generations, body, shape)
        # The status is known when the first token is.
        head = await until_gone(request, _first(events))
        return EventStream(head, events, on_close=cancel_all)
    except ClientGone:
        cancel_all()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except BaseException:
        cancel_all()
        raise


async def _first(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


async def _run_all(generations: Sequence[Generation]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for generation in generations:
                group.create_task(_run(generation))
    except* ServiceError as errors:
        raise _leaf(errors) from None


async def _run(generation: Generation) -> None:
    async for _ in generation.pieces():
        pass


async def _events(
    generations: Sequence[Generation], body: SamplingBody, shape: Shape
) -> AsyncIterator[bytes]:
    options = body.stream_options
    has_usage = options is not None and bool(options.include_usage)
    is_continuous = options is not None and bool(options.continuous_usage_stats)
    seen: set[int] = set()
    async for generation, piece in _merged(generations):
        chunk = shape.chunk(generation, piece, is_first=generation.index not in seen)
        seen.add(generation.index)
        if has_usage and is_continuous:
            chunk["usage"] = usage(generations)
        yield event(chunk)
    if has_usage:
        yield event(shape.usage_chunk(generations))
    yield DONE


async def _merged(
    generations: Sequence[Generation],
) -> AsyncIterator[tuple[Generation, Piece]]:
    """Pieces of all generations as they come."""
    if len(generations) == 1:
        async for piece in generations[0].pieces():
            yield generations[0], piece
        return
    arrived: asyncio.Queue[tuple[Generation, Piece] | ServiceError | None] = asyncio.Queue()

    async def pump(generation: Generation) -> None:
        try:
            async for piece in generation.pieces():
                arrived.put_nowait((generation, piece))
            arrived.put_nowait(None)
        except ServiceError as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(pump(generation)) for generation in generations]
    try:
        num_open = len(tasks)
        while num_open:
            item = await arrived.get()
            if isinstance(item, ServiceError):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _leaf(group: BaseExceptionGroup[ServiceError]) -> ServiceError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ServiceError), "the group was split by that type"
    return error
