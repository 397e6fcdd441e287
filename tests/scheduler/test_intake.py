"""What is let in: limits in all and for each tenant, and what the refused are told."""

from array import array
from typing import Any

import pytest

from services.scheduler.config import SchedulerConfig
from services.scheduler.core.fleet import Fleet
from services.scheduler.intake import Intake, Memory
from shared.errors import InvalidRequest, Overloaded, PromptTooLong, Unavailable
from shared.ids import InstanceId, RequestId
from shared.messages import SubmitTokens, TextOptions
from shared.sampling import SamplingParams
from tests.scheduler.driver import make_capacity, make_request
from tests.scheduler.herd import make_scheduler


class Door:
    """An intake before a fleet of one executor on which nothing runs, so that everything waits."""

    def __init__(self, **settings: Any) -> None:
        self.fleet = Fleet(make_scheduler)
        self.fleet.add_executor(InstanceId("executor"), make_capacity())
        self.intake = Intake(self.fleet, SchedulerConfig(**settings))
        self._num_knocks = 0

    def knock(self, tenant: str = "a", *, num_tokens: int = 10, now: float = 0.0, **fields: Any) -> None:
        """Submit a request. Raises what refuses it."""
        self._num_knocks += 1
        message = SubmitTokens(
            request_id=RequestId(f"r{self._num_knocks}"),
            gateway_id=InstanceId("gateway"),
            model=fields.pop("model", "model"),
            tenant=tenant,
            prompt_token_ids=array("i", [1] * num_tokens),
            sampling=SamplingParams(seed=1),
            text=TextOptions(),
            num_choices=fields.pop("num_choices", 1),
            max_tokens=fields.pop("max_tokens", 5),
            **fields,
        )
        self.intake.queue(self.intake.admit(message, now))

    def starts(self, now: float, tenant: str = "a", num_tokens: int = 10) -> None:
        """A request that waited runs now."""
        self.intake.started(make_request("started", [1] * num_tokens, tenant=tenant), now)


def refusal(door: Door, tenant: str = "a", **fields: Any) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        door.knock(tenant, **fields)
    assert caught.value.status == 429
    return caught.value


def test_so_many_requests_wait_in_all() -> None:
    door = Door(max_waiting_requests=3)
    for tenant in "abc":
        door.knock(tenant)
    assert str(refusal(door, "d")) == "3 requests wait already"
    assert door.fleet.num_requests == 3


def test_so_many_tokens_wait_in_all() -> None:
    door = Door(max_waiting_tokens=30)
    for tenant in "abc":
        door.knock(tenant, num_tokens=10)
    assert str(refusal(door, "d")) == "requests with 30 tokens wait already"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tenant_requests": 2}, "2 requests of a wait already"),
        ({"max_tenant_tokens": 20}, "requests of a with 20 tokens wait already"),
    ],
)
def test_one_tenant_that_has_its_part_of_the_queue_is_refused_and_others_are_not(
    settings: dict[str, int], message: str
) -> None:
    door = Door(**settings)
    door.knock("a")
    door.knock("a")
    assert str(refusal(door, "a")) == message
    door.knock("b")


def test_a_place_that_is_free_again_is_given_again() -> None:
    door = Door(max_waiting_requests=1)
    door.knock()
    refusal(door)
    door.fleet.cancel(RequestId("r1"))
    door.knock()


@pytest.mark.parametrize(
    ("num_starts", "retry_after_s"),
    [(0, 1.0), (2, 5.0), (5, 2.0), (1000, 1.0)],
    ids=["nothing known", "one in five seconds", "one in two", "no less than a second"],
)
def test_the_refused_are_told_when_a_place_will_be_free_at_the_rate_of_the_last_ten_seconds(
    num_starts: int, retry_after_s: float
) -> None:
    door = Door(max_waiting_requests=1)
    door.knock()
    for number in range(num_starts):
        door.starts(90.1 + 9.9 * number / num_starts)
    assert refusal(door, now=100.0).retry_after_s == retry_after_s


def test_a_tenant_at_its_limit_is_told_by_the_pace_of_its_own_requests() -> None:
    """Those of others start ten times a second, which frees no place of its own."""
    door = Door(max_tenant_requests=2)
    door.knock("flood")
    door.knock("flood")
    for number in range(50):
        door.starts(number / 10, tenant="other")
    assert refusal(door, "flood", now=5.0).retry_after_s == 1.0, "nothing is known of its pace"
    door.starts(5.0, tenant="flood")
    assert refusal(door, "flood", now=5.0).retry_after_s == 10.0


def test_too_many_tokens_are_waited_for_as_long_as_tokens_take() -> None:
    door = Door(max_waiting_tokens=100)
    door.knock(num_tokens=90)
    door.starts(1.0, num_tokens=20)
    door.starts(1.0, num_tokens=20)
    assert refusal(door, now=2.0, num_tokens=50).retry_after_s == 10.0, "forty too many, at forty in ten seconds"
    assert refusal(door, now=2.0, num_tokens=30).retry_after_s == 5.0
    assert refusal(door, now=2.0, num_tokens=150).retry_after_s == 22.5, "no more than wait can go"


@pytest.mark.parametrize("limit", ["max_waiting_tokens", "max_tenant_tokens"])
def test_a_request_counts_with_its_own_tokens_unless_nothing_waits(limit: str) -> None:
    door = Door(**{limit: 100})
    door.knock(num_tokens=150)
    door.fleet.cancel(RequestId("r1"))
    door.knock(num_tokens=60)
    refusal(door, num_tokens=41)
    door.knock(num_tokens=40)


def test_what_only_an_executor_that_drains_could_hold_is_refused_for_now() -> None:
    door = Door()
    large = InstanceId("large")
    door.fleet.add_executor(large, make_capacity(num_blocks=200))
    door.fleet.add(make_request("runs", [9] * 300, arrival=1))
    door.fleet.schedule(large)
    door.fleet.drain_executor(large)
    with pytest.raises(Unavailable) as caught:
        door.knock(num_tokens=300)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
    with pytest.raises(PromptTooLong, match="an executor holds 256"):
        door.knock(num_tokens=900)
    door.knock(num_tokens=200)
    door.fleet.drain_executor(InstanceId("executor"))
    with pytest.raises(Unavailable):
        door.knock(num_tokens=10)


def test_the_rate_is_that_of_lately() -> None:
    door = Door(max_waiting_requests=1)
    door.knock()
    for number in range(1000):
        door.starts(number / 100)
    assert refusal(door, now=10.0).retry_after_s == 1.0
    door.starts(25.0)
    assert refusal(door, now=30.0).retry_after_s == 10.0
    assert refusal(door, now=90.0).retry_after_s == 1.0, "nothing started lately, so nothing is known"


def test_the_refused_wait_for_as_many_places_as_are_too_few_but_a_minute_at_most() -> None:
    door = Door(max_waiting_requests=2)
    door.starts(1.0)
    for number in range(4):  # what ran on the executor waits again, beyond the limit
        door.fleet.add(make_request(f"back{number}", [number], arrival=100 + number))
    assert refusal(door, now=2.0).retry_after_s == 30.0
    for number in range(4, 20):
        door.fleet.add(make_request(f"back{number}", [number], arrival=100 + number))
    assert refusal(door, now=2.0).retry_after_s == 60.0


@pytest.mark.parametrize("max_waiting_requests", [1, 1000])
def test_what_never_fits_is_refused_for_good_with_both_numbers_even_when_the_queue_is_full(
    max_waiting_requests: int,
) -> None:
    door = Door(max_waiting_requests=max_waiting_requests)
    door.knock()
    with pytest.raises(
        PromptTooLong, match="250 tokens of prompt and 50 to generate make 300; an executor holds 256"
    ) as caught:
        door.knock(num_tokens=250, max_tokens=50)
    assert caught.value.status == 400
    with pytest.raises(PromptTooLong, match="256 tokens of prompt and 1 to generate make 257"):
        door.knock(num_tokens=256, max_tokens=None)


def test_a_model_that_nobody_serves_is_refused_with_a_time_to_come_back() -> None:
    with pytest.raises(Unavailable) as caught:
        Door().knock(model="another")
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)


def test_what_is_nonsense_is_the_clients_fault_and_takes_no_place() -> None:
    door = Door()
    with pytest.raises(InvalidRequest):
        door.knock(max_tokens=0)
    with pytest.raises(InvalidRequest):
        door.knock(num_choices=0)
    with pytest.raises(InvalidRequest):
        door.knock(num_tokens=0)
    assert door.fleet.num_requests == 0


def test_a_memory_forgets_the_oldest() -> None:
    memory = Memory(size=3)
    for name in "abcd":
        memory.add(RequestId(name), 1)
    memory.discard(RequestId("c"))
    assert [memory.has(RequestId(name), 1) for name in "abcd"] == [False, True, False, True]


def test_what_happened_to_an_attempt_happened_to_earlier_ones_too() -> None:
    memory = Memory()
    memory.add(RequestId("a"), 2)
    memory.add(RequestId("a"), 1)
    assert [memory.has(RequestId("a"), attempt) for attempt in (1, 2, 3)] == [True, True, False]
