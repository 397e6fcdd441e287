"""The W3C's Trace Context, as it comes from clients: `traceparent` and `tracestate`.

What is not as the standard says is passed over, and a trace begins anew: a bad header never fails a request.
"""

import re
from collections.abc import Sequence
from typing import Final

from shared.messages import TraceContext

_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_INVALID_VERSION: Final = "ff"
_FIRST_VERSION: Final = "00"
_SAMPLED: Final = 1

_MAX_STATE_CHARS: Final = 512
_MAX_STATE_MEMBERS: Final = 32
_KEY: Final = r"[a-z0-9][a-z0-9_\-*/@]{0,255}"
_VALUE: Final = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_MEMBER: Final = re.compile(rf"({_KEY})={_VALUE}", re.ASCII)


def parse(traceparents: Sequence[str], tracestates: Sequence[str] = ()) -> TraceContext | None:
    """The place in a trace that a client names with its headers, all values of each; None if it names none.

    Later versions of `traceparent` are read as far as they are like the first. Without a good `traceparent` there must
    be no `tracestate`; a bad `tracestate` is dropped alone.
    """
    if len(traceparents) != 1:
        return None
    match = _PARENT.fullmatch(traceparents[0].strip(" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == _INVALID_VERSION or (version == _FIRST_VERSION and more):
        return None
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    is_sampled = bool(int(flags, 16) & _SAMPLED)
    return TraceContext(bytes.fromhex(trace_id), bytes.fromhex(span_id), is_sampled, parse_state(tracestates))


def parse_state(tracestates: Sequence[str]) -> str:
    """The members of all `tracestate` headers in one, in order; nothing if there is anything wrong with them."""
    members = [member.strip(" \t") for header in tracestates for member in header.split(",")]
    members = [member for member in members if member]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in matches if match is not None}
    state = ",".join(members)
    if len(keys) != len(members) or len(members) > _MAX_STATE_MEMBERS or len(state) > _MAX_STATE_CHARS:
        return ""
    return state
