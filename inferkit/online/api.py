"""The HTTP interface of an instance: its own endpoints and those of OpenAI's."""

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inferkit.core.errors import RequestError
from inferkit.online.answer import answer
from inferkit.online.bodies import ChatBody, CompletionBody, GenerateBody, SamplingBody
from inferkit.online.errors import BadRequest, GenerationFailed, ServiceError, UnknownModel
from inferkit.online.middleware import RequestIds
from inferkit.online.service import Call, GenerationService
from inferkit.online.shapes import ChatShape, CompletionShape, GenerateShape

DEFAULT_COMPLETION_TOKENS = 16
"""Of /v1/completions, where neither the request nor the configuration says how many."""
OWNER = "inferkit"
PREFIXES = ("cmpl-", "chatcmpl-")


def make_app(
    service: GenerationService,
    *,
    facts: Mapping[str, Any],
    sampling_defaults: Mapping[str, Any] | None = None,
) -> FastAPI:
    """The application; it shares the event loop of its service.

    Args:
        facts: of the instance, for /stats.
        sampling_defaults: of /generate; the interfaces of OpenAI have those of OpenAI.
    """
    # The OpenAPI page loads scripts from elsewhere; the description itself is enough.
    app = FastAPI(title="inferkit", docs_url=None, redoc_url=None)
    app.add_middleware(RequestIds)
    add_error_handlers(app)
    _add_state_routes(app, service, facts)
    _add_openai_routes(app, service)
    defaults = dict(sampling_defaults or {})

    @app.post("/generate")
    async def generate(request: Request, body: GenerateBody) -> Response:
        _check_model(service, body)
        with _naming_fields():
            n = body.num_samples(num_prompts=1)
            if n != 1:
                raise RequestError(f"n={n}: /generate makes one generation; use /v1/completions")
            call = Call(
                prompts=[body.prompt_given()],
                sampling=body.sampling_params(logprobs=body.logprobs, **defaults),
                request_id=_request_id(request),
                room=body.room(num_generations=1),
                is_streamed=body.is_streamed,
            )
        shape = GenerateShape(request_id=call.request_id)
        return await answer(request, service, call, body, shape)

    return app


def _add_openai_routes(app: FastAPI, service: GenerationService) -> None:
    created = int(time.time())
    model = service.model

    def entry() -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": created,
            "owned_by": OWNER,
            "root": model.path or model.name,
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry()]}

    @app.get("/v1/models/{model_id:path}")
    async def one_model(model_id: str) -> dict[str, Any]:
        _check_name(service, model_id)
        return entry()

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        _check_model(service, body)
        with _naming_fields():
            body.check()
            prompts = body.prompts()
            n = body.num_samples(num_prompts=len(prompts))
            default = model.default_max_tokens or DEFAULT_COMPLETION_TOKENS
            call = Call(
                prompts=prompts,
                sampling=body.sampling_params(logprobs=body.logprobs, max_tokens=default),
                n=n,
                request_id=_request_id(request),
                room=body.room(num_generations=n * len(prompts)),
                is_streamed=body.is_streamed,
            )
        shape = CompletionShape(
            request_id=call.request_id, model=model.name, tokenizer=service.tokenizer
        )
        return await answer(request, service, call, body, shape)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        _check_model(service, body)
        with _naming_fields():
            body.check()
            n = body.num_samples(num_prompts=1)
            if body.max_completion_tokens is not None:
                body.max_tokens = body.max_completion_tokens
            call = Call(
                prompts=[body.prompt()],
                sampling=body.sampling_params(logprobs=body.num_logprobs()),
                n=n,
                request_id=_request_id(request),
                room=body.room(num_generations=n),
                is_streamed=body.is_streamed,
                template_kwargs=body.chat_template_kwargs or {},
            )
        shape = ChatShape(request_id=call.request_id, model=model.name, tokenizer=service.tokenizer)
        return await answer(request, service, call, body, shape)


def add_ready_and_stats(app: FastAPI, service: GenerationService, facts: Mapping[str, Any]) -> None:
    """What an instance of every role answers."""

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """Requests are taken; a client's instance has also generated."""
        state, reasons = service.state, service.missing()
        body = {"status": state, **({"reasons": reasons} if reasons else {})}
        return JSONResponse(body, status_code=200 if state == "ready" else 503)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return {
            **facts,
            "status": service.state,
            "requests": {
                "running": service.dispatcher.num_running,
                "started": service.num_started,
            },
            **service.dispatcher.stats(),
        }


def _add_state_routes(app: FastAPI, service: GenerationService, facts: Mapping[str, Any]) -> None:
    add_ready_and_stats(app, service, facts)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process lives and answers."""
        return {"status": "ok"}

    @app.post("/abort")
    async def abort(request: Request) -> dict[str, int]:
        """End generations by `request_id` or `bootstrap_room`; unknown ones are none."""
        try:
            body = await request.json()
        except ValueError:
            body = None
        with _naming_fields():
            request_id, room = _abort_target(body)
        return {"aborted": service.abort(request_id=request_id, room=room)}


def _abort_target(body: Any) -> tuple[str, int | None]:
    """Client's id of a request, and its room.

    Raises:
        RequestError: neither is given.
    """
    if not isinstance(body, dict):
        raise RequestError("request_id: the body must be a JSON object with it or bootstrap_room")
    request_id = body.get("request_id")
    if request_id is not None and not isinstance(request_id, str):
        raise RequestError(f"request_id={request_id!r:.40} is no text")
    for prefix in PREFIXES:
        request_id = (request_id or "").removeprefix(prefix)
    given = SamplingBody.model_construct(bootstrap_room=body.get("bootstrap_room"))
    room = given.room(num_generations=1)
    if not request_id and room is None:
        raise RequestError("request_id: it is missing; give it or bootstrap_room")
    return request_id or "", room


def _check_model(service: GenerationService, body: SamplingBody) -> None:
    if body.model:
        _check_name(service, body.model)


def _check_name(service: GenerationService, name: str) -> None:
    known = [known for known in (service.model.name, service.model.path) if known]
    if name not in known:
        raise UnknownModel(
            f"model={name!r:.100} is not served here; use {known[0]!r}", param="model"
        )


def _request_id(request: Request) -> str:
    known: str = request.state.request_id
    return known or secrets.token_hex(12)


@contextlib.contextmanager
def _naming_fields() -> Iterator[None]:
    """What is wrong with a body becomes a 400 that names its field."""
    try:
        yield
    except RequestError as error:
        raise BadRequest.of(error) from None


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> Response:
        return JSONResponse(error.body, status_code=error.status, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> Response:
        faults = [_fault(entry) for entry in error.errors()]
        names = [name for name, _ in faults if name]
        text = "; ".join(text for _, text in faults)
        refusal = BadRequest(text, param=names[0] if names else None)
        return JSONResponse(refusal.body, status_code=refusal.status)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        refusal = BadRequest(f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(refusal.body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        failure = GenerationFailed("internal error; see the log of the server")
        return JSONResponse(failure.body, status_code=failure.status)


def _fault(entry: Any) -> tuple[str, str]:
    """Field and sentence of one of pydantic's errors."""
    if entry["type"] == "json_invalid":
        return "", f"the body is no JSON: {entry.get('ctx', {}).get('error', entry['msg'])}"
    name = next((str(part) for part in entry["loc"][1:]), "")
    if not name:
        return "", f"the body must be a JSON object, sent as application/json ({entry['msg']})"
    return name, f"{name}={entry['input']!r:.80}: {entry['msg']}"
