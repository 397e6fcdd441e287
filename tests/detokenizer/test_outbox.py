"""What is gathered leaves as few messages, in order, none too large."""

from services.detokenizer.outbox import Outbox
from shared.codec import encode
from shared.ids import InstanceId, RequestId
from shared.messages import (
    ChoiceText,
    ErrorInfo,
    Outcome,
    RequestClosed,
    StopStringFound,
    TextAlternative,
    TextLogprobs,
    TextProduced,
    Usage,
    int32s,
)

ME = InstanceId("detokenizer-1")
GATEWAYS = InstanceId("gateway-1"), InstanceId("gateway-2")
SCHEDULER = InstanceId("scheduler-1")


def text(n: int, content: str = "text", num_alternatives: int = 0) -> ChoiceText:
    """Text of request `n`."""
    alternative = TextAlternative("👍", -0.123456789, "👍".encode())
    logprobs = (TextLogprobs(alternative, (alternative,) * num_alternatives),) if num_alternatives else ()
    return ChoiceText(RequestId(f"req-{n:032}"), 0, n, int32s([n]), n, content, None, logprobs)


def closed(n: int) -> RequestClosed:
    """The end of request `n`."""
    error = ErrorInfo(500, "server_error", "internal_error", "Ö" * 100)
    return RequestClosed(
        RequestId(f"req-{n:032}"), Outcome.FAILED, Usage(1 << 30, 1 << 30, (1 << 30,) * 8), error=error
    )


def test_one_message_for_each_gateway_and_single_ones_for_others() -> None:
    outbox = Outbox(ME)
    outbox.add_event(GATEWAYS[0], text(1))
    outbox.add_event(GATEWAYS[1], text(2))
    outbox.add_event(GATEWAYS[0], closed(1))
    outbox.add_event(GATEWAYS[0], text(3))
    found = StopStringFound(RequestId("req-3"), 0, 7)
    outbox.add_message(SCHEDULER, found)
    assert len(outbox) == 5
    assert outbox.take(max_message_bytes=1 << 20) == [
        (SCHEDULER, found),
        (GATEWAYS[0], TextProduced(ME, (text(1), text(3)), (closed(1),))),
        (GATEWAYS[1], TextProduced(ME, (text(2),))),
    ]
    assert len(outbox) == 0
    assert outbox.take(max_message_bytes=1 << 20) == []


def test_what_does_not_fit_one_message_leaves_in_several_in_the_same_order() -> None:
    outbox = Outbox(ME)
    events = [text(n, "👍" * (n % 50), num_alternatives=n % 21) for n in range(300)] + [closed(n) for n in range(100)]
    for event in events:
        outbox.add_event(GATEWAYS[0], event)
    messages = [message for _, message in outbox.take(max_message_bytes=20_000)]
    assert len(messages) > 10
    assert all(len(encode(message)) <= 20_000 for message in messages)
    sent: list[ChoiceText | RequestClosed] = []
    for message in messages:
        assert isinstance(message, TextProduced)
        sent += [*message.texts, *message.closed]
    assert sent == events


def test_an_event_larger_than_a_message_leaves_alone() -> None:
    outbox = Outbox(ME)
    for event in (text(1), text(2, "x" * 5000), text(3)):
        outbox.add_event(GATEWAYS[0], event)
    messages = [message for _, message in outbox.take(max_message_bytes=1000)]
    assert [message.texts for message in messages if isinstance(message, TextProduced)] == [
        (text(1),),
        (text(2, "x" * 5000),),
        (text(3),),
    ]
