"""The detokenizer's metrics, and where they are read."""

from collections.abc import Callable

from services.detokenizer.open_requests import OpenRequests
from shared.telemetry.metrics import Instrument, Kind, Reading


def detokenizer_instruments(requests: OpenRequests, max_open_choices: int) -> list[Instrument]:
    """The instruments of one detokenizer."""
    return [
        _now("requests.open", "{request}", "Requests being decoded", lambda: len(requests)),
        _now("choices.open", "{choice}", "Choices being decoded", lambda: requests.num_open_choices),
        _now("choices.limit", "{choice}", "How many there may be", lambda: max_open_choices),
        Reading(
            "shoal.detokenizer.requests",
            Kind.COUNTER,
            "{request}",
            "Requests told to an end",
            lambda: dict(requests.num_ended),
            ("ending",),
        ),
        _count("requests.forgotten", "{request}", "Quiet ones, and strays", lambda: requests.num_forgotten),
        _count("tokens", "{token}", "Tokens decoded", lambda: requests.num_tokens),
        _count("gaps", "{gap}", "Times that entries were missing", lambda: requests.gaps.num_found),
        _count("replays", "{request}", "Times a scheduler was asked again", lambda: requests.gaps.num_asked),
        _count("messages.unknown", "{message}", "About requests not open here", lambda: requests.num_unknown),
        _count("stop_strings", "{choice}", "Stop strings found", lambda: requests.num_stop_strings),
    ]


def _now(name: str, unit: str, help: str, read: Callable[[], float]) -> Reading:  # noqa: A002
    return Reading(f"shoal.detokenizer.{name}", Kind.SUM, unit, help, read)


def _count(name: str, unit: str, help: str, read: Callable[[], float]) -> Reading:  # noqa: A002
    return Reading(f"shoal.detokenizer.{name}", Kind.COUNTER, unit, help, read)
