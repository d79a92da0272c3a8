"""What a client is told when its request is refused: a status, and the error in the API's form."""

from __future__ import annotations

import re

from quire import errors

__all__ = ["Problem", "defect", "from_engine"]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "cancelled",
    500: "server_error",
    503: "overloaded_error",
}

# The status of each outcome of the library. Those that are absent are defects of the server: 500.
_STATUS: dict[type[errors.QuireError], int] = {
    errors.BadArgumentError: 400,
    errors.TooLargeError: 413,
    errors.FullError: 503,
    errors.OutOfPagesError: 503,
    errors.OutOfMemoryError: 503,
    errors.UnavailableError: 503,
    errors.CancelledError: 503,
    errors.ClosedError: 503,
}
_RETRY_SECONDS = 1
_MESSAGE_CHARACTERS = 300
_PARAM_CHARACTERS = 128


class Problem(Exception):
    """A refused request.

    Args:
        status: of HTTP.
        message: what is wrong, with the value and the range; without text of other requests.
        param: the field of the body, such as "messages[2].content"; None where it is none.
        code: a stable word for programs.
        retry_after: seconds after which the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        if len(message) > _MESSAGE_CHARACTERS:
            message = message[: _MESSAGE_CHARACTERS - 3] + "..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = None if param is None else param[:_PARAM_CHARACTERS]
        self.code = code
        self.retry_after = retry_after

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error")

    def openai(self) -> dict[str, object]:
        """The body that OpenAI's clients read."""
        fields = {"message": self.message, "type": self.type, "param": self.param}
        return {"error": {**fields, "code": self.code}}

    def anthropic(self) -> dict[str, object]:
        """The body that Anthropic's clients read."""
        kind = "api_error" if self.type == "server_error" else self.type
        where = f"{self.param}: " if self.param and self.param not in self.message else ""
        return {"type": "error", "error": {"type": kind, "message": where + self.message}}

    def told_at(self, path: str) -> dict[str, object]:
        """The body, in the form of the API that has the path."""
        return self.anthropic() if path.startswith("/v1/messages") else self.openai()

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def defect(request_id: str) -> Problem:
    """What a client is told of an error that has no name: the log has it under the request's id."""
    return Problem(500, f"the server failed; its log has more under {request_id}")


def from_engine(error: errors.QuireError, prompt_field: str | None = None) -> Problem:
    """The problem that an error of the library is for a client. prompt_field: of the body."""
    status = _STATUS.get(type(error), 500)
    message = re.sub(r"^(Engine::\w+|\w+Options(::\w+)?): |^SamplingOptions::", "", str(error))
    message = re.sub(r"raise EngineOptions::\w+ or ", "", message)  # which a client cannot do
    if status == 413:
        field = error.option or prompt_field
        return Problem(413, message, param=field, code="context_length_exceeded")
    if status == 400 and error.option:  # options have the names of their fields
        return Problem(400, message, param=error.option, code="invalid_value")
    retry_after = _RETRY_SECONDS if status == 503 else None
    return Problem(status, message, code=error.code.lower() or None, retry_after=retry_after)
