"""Requests that no executor serves at the moment: where they wait, for how long, and what that does to others."""

from array import array

from services.scheduler.core.fleet import Fleet
from services.scheduler.core.request import Request
from shared.ids import InstanceId, RequestId
from shared.messages import Outcome
from shared.sampling import SamplingParams
from tests.scheduler.driver import make_capacity, make_request
from tests.scheduler.world import Rules, World

SMALL, LARGE = make_capacity(num_blocks=4), make_capacity(num_blocks=64)


def of_model(model: str, name: str, tenant: str, arrival: int, *, max_tokens: int = 4) -> Request:
    """A request for another model than the usual one."""
    return Request(
        RequestId(name),
        array("i", [1, 2, 3, 4]),
        SamplingParams(seed=1),
        arrival=arrival,
        max_tokens=max_tokens,
        model=model,
        tenant=tenant,
    )


def served(fleet: Fleet, tenant: str) -> float:
    return fleet._shares.served(tenant)


def test_what_only_the_executor_that_left_could_hold_fails_with_both_numbers_instead_of_waiting_for_ever() -> None:
    world = World(Rules(depth=1))
    large, _ = world.attach(LARGE), world.attach(SMALL)
    runs = make_request("runs", [1] * 40, max_tokens=9)
    world.send(runs)
    world.work()
    waits = make_request("waits", [2] * 40, arrival=1, max_tokens=4)
    world.send(waits)
    world.drain(large)
    assert world.open_ids() == ["runs", "waits"]
    while large in world.members:
        world.work()
    end = world.sent[waits.request_id].ends[0]
    assert (end.outcome, end.reason) == (
        Outcome.FAILED,
        "44 tokens of prompt and output cannot fit; at most 16 can",
    )
    assert world.sent[runs.request_id].ends[0].outcome is Outcome.COMPLETED
    world.finish()


def test_what_waits_in_the_lobby_is_taken_by_the_next_executor_that_can_hold_it() -> None:
    world = World(Rules(depth=1))
    large = world.attach(LARGE)
    world.send(make_request("runs", [1] * 40, max_tokens=9))
    world.work()
    world.send(make_request("waits", [2] * 40, arrival=1, max_tokens=4))
    world.drain(large)
    world.attach(LARGE)
    world.finish()
    assert {sent.ends[0].outcome for sent in world.sent.values()} == {Outcome.COMPLETED}


def test_a_tenant_that_waits_for_a_model_nobody_serves_saves_up_nothing() -> None:
    world = World(Rules(depth=1))
    world.attach(make_capacity(max_slots=1))
    world.send(of_model("missing", "parked", "parked", 0))
    for number in range(20):
        world.send(make_request(f"r{number}", [number] * 10, arrival=1 + number, tenant="busy"))
    for _ in range(30):
        world.work()
    before = served(world.fleet, "busy")
    assert before > 100
    world.send(make_request("new", [40] * 4, arrival=100, tenant="new"))
    assert served(world.fleet, "new") == before, "a newcomer starts with those who are served, not with who is parked"
    world.attach(make_capacity(model="missing"))
    assert served(world.fleet, "parked") >= before, "and so does who was parked, once there is an executor"
    world.finish()


def test_counters_follow_requests_between_executors_and_lobby() -> None:
    world = World(Rules(depth=1))
    for number in range(3):
        executor_id = world.attach(make_capacity())
        world.send(make_request(f"r{number}", [number] * 8, arrival=number, max_tokens=9, num_choices=2))
        world.work()
        world.drain(executor_id)
        world.remove(executor_id, has_died=number % 2 == 0)
    assert world.fleet.get(RequestId("r0")) is not None
    world.attach(make_capacity())
    world.finish()
    assert world.fleet._shares._num_open == {}


def test_models_do_not_mix() -> None:
    world = World(Rules())
    one, other = world.attach(make_capacity(model="model")), world.attach(make_capacity(model="other"))
    world.send(of_model("other", "r", "a", 0))
    assert {len(world.fleet.schedulers[InstanceId(each)].waiting) for each in (one, other)} == {0, 1}
    world.finish()
    assert world.members[one].fake.num_rows_run == 0
