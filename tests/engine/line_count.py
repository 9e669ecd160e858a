"""How much Python the engine runs for a call: a cost that is the same on a busy machine."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import nanollm.engine


def count_lines(call: Callable[[], Any]) -> int:
    """Lines of nanollm/engine executed by call(), each pass of a loop or comprehension counted."""
    folder = nanollm.engine.__path__[0]
    count = 0

    def trace_line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace_line

    def trace_call(frame: FrameType, event: str, arg: Any) -> Any:
        return trace_line if frame.f_code.co_filename.startswith(folder) else None

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
