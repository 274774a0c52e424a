"""What a client is told, as HTTP status and error body. Knows no web framework."""

import re
from typing import Any

from inferkit.core.errors import InferkitError, RequestError

RETRY_AFTER_S = 1


class ServiceError(InferkitError):
    """A request that gets no result.

    Args:
        message: for the client; names field, value, what is allowed.
        param: the field of the request's body that is at fault.
        code: for programs.
    """

    status = 500
    kind = "internal_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """In the form that OpenAI's clients read."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        return {}


class BadRequest(ServiceError):
    status = 400
    kind = "invalid_request_error"

    @classmethod
    def of(cls, error: RequestError) -> "BadRequest":
        """Its messages begin with the field: `top_p=2.0 is out of range; ...`."""
        text = str(error)
        found = re.match(r"(\w+)(?==|:| has )", text)
        return cls(text, param=found[1] if found else None)


class UnknownModel(ServiceError):
    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class RoomInUse(ServiceError):
    status = 409
    kind = "conflict_error"
    code = "room_in_use"


class TooLarge(ServiceError):
    status = 413
    kind = "invalid_request_error"


class Unavailable(ServiceError):
    """Not now: starting, draining, or without workers. Another try may find it well."""

    status = 503
    kind = "service_unavailable"

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_S)}


class GenerationFailed(ServiceError):
    """It was running and cannot go on."""

    kind = "generation_failed"


class TimeOver(ServiceError):
    status = 504
    kind = "timeout"
