"""The server as a whole: which path goes where, who may come in, and how it starts and ends."""

import asyncio
import gc
import hashlib
import hmac
import logging
import resource
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import nanollm
from nanollm.async_engine import CLOSED, AsyncLLMEngine, QueueFullError
from nanollm.runtime.channel import EngineDeadError
from nanollm.server.chat import create_chat
from nanollm.server.completions import create_completion
from nanollm.server.errors import ApiError, error_response
from nanollm.server.http import BoundedHttpProtocol, read_json
from nanollm.server.protocol import DetokenizeRequest, TokenizeRequest
from nanollm.server.service import Service
from nanollm.text.prompts import need_tokenizer
from nanollm.text.tokenizer import encode_prompt

logger = logging.getLogger("nanollm")

DEAD_SECONDS = 2.0  # from the engine's death to the server's end: open requests get their errors, /health says 503
KEEP_ALIVE_SECONDS = 75  # longer than clients keep a connection, so that they never send on one that is closing
MOST_COUNTED = 2**18  # tokens of a text that /tokenize takes, or of the longest prompt: prompts wait meanwhile
LAST_SECONDS = 5.0  # for responses to end after the drain time, when all requests have been aborted


@dataclass
class ServerOptions:
    """How the server serves; the engine's own arguments are EngineConfig's.

    max_waiting: most sequences that may wait for a place in the batch; more requests get 429.
    request_timeout: seconds after which a request is ended; None and 0 are never.
    shutdown_timeout: seconds that open requests have to finish after SIGTERM; then they are aborted.
    api_key: what clients must send as `Authorization: Bearer …`; None lets everybody in.
    allowed_origins: web sites whose pages may call this server from a browser (CORS).
    chat_template: a file to use instead of the model's own template.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = None
    allowed_origins: list[str] = field(default_factory=list)
    chat_template: Path | None = None
    max_waiting: int = 1024
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0


class KeyCheck:
    """Lets nobody past without the key, except to /health."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = _digest(f"Bearer {api_key}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = b"".join(value for name, value in scope.get("headers", ()) if name == b"authorization")
        # Digests are of one length, so that the time says nothing of the key's.
        if scope["path"] != "/health" and not hmac.compare_digest(_digest(given), self._digest):
            response = error_response(ApiError(401, "a valid API key is needed: Authorization: Bearer …"))
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def build_app(service: Service, options: ServerOptions) -> ASGIApp:
    """All paths of the server."""
    engine = service.engine

    async def health(request: Request) -> Response:
        return Response(status_code=503 if engine.dead.is_set() else 200)

    async def version(request: Request) -> Response:
        return _json({"version": nanollm.__version__})

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    model = {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "nanollm",
        "max_model_len": engine.max_model_len,
    }

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return _json(model)

    async def tokenize(request: Request) -> Response:
        asked = await read_json(request, TokenizeRequest)
        service.check_model(asked.model)
        text, special = asked.prompt, asked.add_special_tokens
        if asked.messages is not None:
            _, ids = await service.encode_chat(
                asked.messages, asked.tools, asked.add_generation_prompt, asked.chat_template_kwargs
            )
        elif text is None:
            raise ApiError(400, "give prompt or messages")
        else:
            tokenizer = need_tokenizer(engine.tokenizer, "text")
            encode = partial(encode_prompt, add_special_tokens=special, most=max(engine.max_model_len, MOST_COUNTED))
            ids = await engine.in_text_thread(encode, tokenizer, text)
        return _json({"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids})

    async def detokenize(request: Request) -> Response:
        asked = await read_json(request, DetokenizeRequest)
        service.check_model(asked.model)
        tokenizer = need_tokenizer(engine.tokenizer, "text")
        if any(not 0 <= token_id < len(tokenizer) for token_id in asked.tokens):
            raise ApiError(400, f"tokens must be from 0 to {len(tokenizer) - 1}")
        text = await engine.in_text_thread(lambda: tokenizer.decode(asked.tokens, clean_up_tokenization_spaces=False))
        return _json({"prompt": text})

    paths: dict[str, dict[str, Callable[[Request], Awaitable[Response]]]] = {
        "GET": {
            "/health": health,
            "/version": version,
            "/metrics": metrics,
            "/v1/models": models,
            "/v1/models/{name:path}": one_model,  # names may have slashes
        },
        "POST": {
            "/v1/completions": partial(create_completion, service),
            "/v1/chat/completions": partial(create_chat, service),
            "/tokenize": tokenize,
            "/detokenize": detokenize,
        },
    }
    app = Starlette(
        routes=[Route(path, call, methods=[method]) for method, calls in paths.items() for path, call in calls.items()],
        exception_handlers=dict.fromkeys(
            (HTTPException, ApiError, ValueError, TimeoutError, EngineDeadError, QueueFullError, Exception), _on_error
        ),
    )
    app.router.redirect_slashes = False
    guarded: ASGIApp = app if options.api_key is None else KeyCheck(app, options.api_key)
    if options.allowed_origins:  # outermost: a browser asks first, without a key
        guarded = CORSMiddleware(guarded, options.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    return guarded


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return error_response(error)


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def serve(model: str, options: ServerOptions, engine_args: dict[str, Any]) -> int:
    """Serve until SIGTERM, SIGINT or the engine's death; returns the exit code. ValueError if it can't start."""
    import uvloop

    return uvloop.run(_serve(model, options, engine_args))


async def _serve(model: str, options: ServerOptions, engine_args: dict[str, Any]) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection is an open file
    template = None if options.chat_template is None else options.chat_template.read_text()
    name = options.served_model_name or model
    listener = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))  # before the model is loaded, in case the port is taken
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(
            f"can't listen on {options.host}, port {options.port} ({error}): give another --host or --port"
        ) from None
    async with AsyncLLMEngine(model, max_waiting=options.max_waiting, **engine_args) as engine:
        if template is not None:
            need_tokenizer(engine.tokenizer, "--chat-template").chat_template = template
        config = uvicorn.Config(
            build_app(Service(engine, name, options.request_timeout), options),
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=round(options.shutdown_timeout + LAST_SECONDS),
        )
        server = uvicorn.Server(config)
        for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises what it caught again, at its end
            signal.signal(number, lambda *_: None)
        gc.freeze()  # what is there stays: collections need not go through it
        listener.listen(config.backlog)
        logger.info("serving %s on http://%s:%d/v1", name, *listener.getsockname()[:2])
        ends = asyncio.create_task(_end(server, engine, options.shutdown_timeout))
        await server.serve([listener])
        ends.cancel()
        return 1 if engine.why_dead not in ("", CLOSED) else 0


async def _end(server: uvicorn.Server, engine: AsyncLLMEngine, shutdown_timeout: float) -> None:
    """Stop the server when the engine is dead; abort what is still open shutdown_timeout after it was told to stop."""
    while not server.should_exit:
        if engine.dead.is_set():
            logger.error("%s", engine.why_dead)
            await asyncio.sleep(DEAD_SECONDS)
            server.should_exit = server.force_exit = True
            return
        await asyncio.sleep(0.1)
    logger.info("ending: open requests have %g s to finish", shutdown_timeout)
    await asyncio.sleep(shutdown_timeout)
    for connection in server.server_state.connections:
        if isinstance(connection, BoundedHttpProtocol) and connection.cycle is not None and connection.cycle.more_body:
            connection.transport.abort()  # what has not come whole by now was no request yet
    await engine.close()
