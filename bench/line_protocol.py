"""What bench/bench and its child processes say to each other: a JSON object a line, request and
answer. Libraries that print do not come between: standard output becomes standard error, and the
answers go to the real one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Handler = Callable[..., "dict[str, Any]"]


def serve(handlers: dict[str, Handler]) -> None:
    """Answers until the input ends. A request's "do" names the handler, the rest are its
    arguments. An exception is an answer too: {"error": ...}."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = handlers[request.pop("do")](**request)
        except Exception as error:  # whatever a peer raises: the driver prints it and goes on
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
