"""The instance's side of a leg: POST /leg runs one half of a request for a router.

The body is one `Generate`; the answer is a stream of `Output`, the last one with a finish reason.
The connection is the request: when it closes, the request is aborted. What an instance cannot
take is a status at once: 400 wrong everywhere, 409 the attempt runs already, 503 not here or not
now; what goes wrong later is an output with its reason.
"""

import logging
from collections.abc import Callable

import msgspec
from fastapi import FastAPI
from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferkit.core.messages import DECODE_ERRORS, PROTOCOL_VERSION, Generate, Output, encode
from inferkit.core.request import FinishReason
from inferkit.online.bootstraps import KnownBootstraps
from inferkit.online.dispatcher import DPDispatcher, OutputStream
from inferkit.online.errors import BadRequest, GenerationFailed, ServiceError, Unavailable
from inferkit.online.facts import Side
from inferkit.online.instance import Instance
from inferkit.online.leg_frames import LEG_PATH, pack_frame
from inferkit.online.router_signature import HEADER, RouterSignatures
from inferkit.online.sse import CLIENT_CLOSED_REQUEST, ClientGone, until_gone
from inferkit.online.work import Work

logger = logging.getLogger(__name__)

_DECODER: msgspec.msgpack.Decoder[Generate] = msgspec.msgpack.Decoder(Generate)


class _Version(msgspec.Struct):
    protocol_version: int


class LegServer:
    """Checks legs and hands them to the ranks of this instance.

    Args:
        is_draining: no new leg is taken while it is true.
        signatures: what every leg must be signed with.
    """

    def __init__(
        self,
        *,
        side: Side,
        instance: Instance,
        dispatcher: DPDispatcher,
        bootstraps: KnownBootstraps,
        is_draining: Callable[[], bool],
        signatures: RouterSignatures | None = None,
    ) -> None:
        self.side = side
        self.instance = instance
        self.dispatcher = dispatcher
        self.bootstraps = bootstraps
        self.is_draining = is_draining
        self.signatures = signatures or RouterSignatures()

    def add_to(self, app: FastAPI) -> None:
        @app.post(LEG_PATH, include_in_schema=False)
        async def leg(request: Request) -> Response:
            try:
                body = await request.body()
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            self.signatures.check(request.headers.get(HEADER, ""), "POST", LEG_PATH, body)
            return await self.answer(body)

    async def answer(self, body: bytes) -> Response:
        """Start a leg.

        Raises:
            ServiceError: nothing was started.
        """
        message = read_leg(body)
        self._check_identity(message)
        if self.is_draining():
            raise Unavailable("the instance is shutting down", code="draining")
        await self._check_bootstrap(message)
        dp_rank = None
        if self.side is Side.PREFILL:
            # Decode computes the same number to find the ranks that will send.
            dp_rank = message.room % self.dispatcher.dp_size
        work = Work(
            token_ids=message.token_ids,
            sampling=message.sampling,
            seed=message.seed,
            room=message.room,
            attempt=message.attempt,
            pair=message.pair,
            sample_index=message.sample_index,
            request_id=message.request_id,
            remaining_s=message.remaining_ms / 1000,
        )
        stream = self.dispatcher.submit(work, dp_rank=dp_rank)
        return LegAnswer(stream, message, self.instance)

    def _check_identity(self, message: Generate) -> None:
        """The leg is for this life of this instance."""
        pair = message.pair
        if pair is None:
            raise BadRequest("pair: it is missing; it names both instances of the request")
        if not message.room:
            raise BadRequest("room=0 belongs to no request; allowed is 1 to 2^63-1")
        named = (pair.prefill_id, pair.prefill_epoch)
        if self.side is Side.DECODE:
            named = (pair.decode_id, pair.decode_epoch)
        own = (self.instance.instance_id, self.instance.epoch)
        if message.peer_epoch != self.instance.epoch or named != own:
            raise Unavailable(
                f"this is {self.side} instance {own[0]} in another life; the request is for "
                f"{named[0]}",
                code="other_epoch",
            )

    async def _check_bootstrap(self, message: Generate) -> None:
        if self.side is Side.PREFILL or message.pair is None:
            return
        url = message.pair.bootstrap_url
        if not await self.bootstraps.knows(url):
            known = ", ".join(sorted(self.bootstraps.urls)) or "none"
            raise Unavailable(
                f"bootstrap_url={url!r:.200} belongs to no prefill instance that this decode "
                f"instance knows (known: {known}); give it the address by disagg.prefill_ips and "
                "disagg.bootstrap_port, or let both join one router by disagg.router_url",
                code="unknown_bootstrap",
            )


class LegAnswer(Response):
    """Sends each output as it comes; the end of the connection aborts the request."""

    media_type = "application/octet-stream"

    def __init__(self, stream: OutputStream, message: Generate, instance: Instance) -> None:
        self.status_code = 200
        self.background = None
        self.stream = stream
        self.message = message
        self.instance = instance
        self.init_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await until_gone(Request(scope, receive), self._send_outputs(send))
        except ClientGone:
            logger.debug("the router has closed the leg %s", self.message.key)
        finally:
            self.stream.cancel("the router has closed the leg")

    async def _send_outputs(self, send: Send) -> None:
        async def write(output: Output) -> None:
            is_last = output.finish_reason is not None
            data = pack_frame(encode(output))
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})

        num_tokens = 0
        try:
            async for output in self.stream:
                num_tokens += len(output.token_ids)
                await write(replace(output, peer_epoch=self.message.epoch))
        except ServiceError as error:
            await write(self._failure(error, num_tokens))

    def _failure(self, error: ServiceError, num_tokens: int) -> Output:
        is_refused = isinstance(error, BadRequest)
        return Output(
            instance_id=self.instance.instance_id,
            epoch=self.instance.epoch,
            peer_epoch=self.message.epoch,
            room=self.message.room,
            attempt=self.message.attempt,
            index=num_tokens,
            finish_reason=FinishReason.REFUSED if is_refused else FinishReason.UNAVAILABLE,
            finish_detail=str(error),
        )


def read_leg(body: bytes) -> Generate:
    """The message that a router has sent.

    Raises:
        BadRequest: it is none; names the field.
        GenerationFailed: the router speaks another version of the protocol.
    """
    try:
        message = _DECODER.decode(body)
    except DECODE_ERRORS as error:
        _check_version(body)
        raise BadRequest(f"the leg is malformed: {error}") from None
    if message.protocol_version != PROTOCOL_VERSION:
        raise _other_version(message.protocol_version)
    return message


def _check_version(body: bytes) -> None:
    try:
        version = msgspec.msgpack.decode(body, type=_Version).protocol_version
    except DECODE_ERRORS:
        return
    if version != PROTOCOL_VERSION:
        raise _other_version(version)


def _other_version(version: int) -> ServiceError:
    return GenerationFailed(
        f"the router speaks protocol_version={version}, this instance {PROTOCOL_VERSION}; run the "
        "same release of inferkit on all instances",
        code="protocol_version",
    )
