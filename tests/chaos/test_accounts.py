"""The check of the books itself: it finds a record that is missing, doubled or wrong."""

from shared.ids import InstanceId, RequestId
from shared.messages import Outcome, Usage, UsageRecord
from tests.chaos.accounts import check_books
from tests.chaos.history import Ending
from tests.chaos.progress import Record

COMPLETED = Ending("completed", ("stop", "length"), (10, 7))


def entry(outcome: Outcome = Outcome.COMPLETED, *, num_prompt_tokens: int = 10, output: int = 3) -> UsageRecord:
    usage = Usage(num_prompt_tokens, 0, (4, output))
    return UsageRecord(RequestId("req-1"), "default", "tiny", outcome, usage, 1.0, InstanceId("gateway-1"))


def checked(*entries: UsageRecord, end: Ending = COMPLETED) -> list[str]:
    record = Record("stream-00", 2, [end], ["req-0", "req-1"])
    return check_books({"req-1": list(entries)}, [record])


def test_one_record_with_what_the_client_was_told_is_right() -> None:
    assert checked(entry()) == []


def test_missing_and_doubled_records_are_found() -> None:
    assert checked() == ["stream-00: req-1 has 0 usage records"]
    assert checked(entry(), entry()) == ["stream-00: req-1 has 2 usage records"]


def test_wrong_counts_and_outcomes_are_found() -> None:
    assert len(checked(entry(output=4))) == 1
    assert len(checked(entry(num_prompt_tokens=9))) == 1
    assert len(checked(entry(Outcome.CANCELLED))) == 1
    assert len(checked(entry(), end=Ending("failed", error="unavailable"))) == 1
