"""How an error reaches the client: OpenAI's form, and the status that its client libraries expect."""

from typing import Any

import msgspec
from starlette.responses import Response

from nanollm.async_engine import CLOSED, QueueFullError
from nanollm.runtime.channel import EngineDeadError, as_unicode

RETRY_SECONDS = 1  # what a client that was turned away is told to wait


class ApiError(Exception):
    """An answer other than 200. code: a word for programs, where OpenAI has one."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, as_unicode(message), code


def as_api_error(error: Exception) -> ApiError:
    """Whose fault an exception of a request is, and what they can do."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), "queue_full")
    if isinstance(error, TimeoutError):
        return ApiError(504, str(error), "timeout")
    if isinstance(error, EngineDeadError) and str(error) == CLOSED:
        return ApiError(503, "the server is shutting down", "shutting_down")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), "engine_dead")
    return ApiError(500, f"internal error: {type(error).__name__}")


def error_body(error: ApiError) -> dict[str, Any]:
    """OpenAI's error object."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code or error.status}}


def error_response(error: Exception) -> Response:
    """The response to a request that has none yet."""
    problem = as_api_error(error)
    headers = {}
    if problem.status == 429:
        headers["retry-after"] = str(RETRY_SECONDS)
    if problem.status in (408, 413):  # the rest of the upload is not read
        headers["connection"] = "close"
    body = msgspec.json.encode(error_body(problem))
    return Response(body, problem.status, headers, media_type="application/json")
