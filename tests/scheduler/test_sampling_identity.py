"""What an executor is told about how a choice samples, each time that it is seated: always the same."""

from shared.messages import SlotAssignment
from tests.scheduler.driver import Bench, expected_output, make_capacity, make_request
from tests.scheduler.world import Rules, World


def identity(assignment: SlotAssignment) -> tuple[int, int, int]:
    """What a draw's noise and penalties go by, beside the tokens."""
    return assignment.sampling.seed, assignment.choice_index, assignment.num_prompt_tokens


def test_after_preemption_output_is_still_output_and_seed_and_index_are_the_same() -> None:
    bench = Bench(make_capacity(max_slots=1))
    low = make_request("low", list(range(10)), arrival=5, max_tokens=12, priority=1)
    bench.add(low)
    seatings = []
    for number in range(3):
        plan = bench.step()
        assert plan is not None
        seatings += [each for each in plan.assigned if each.request_id == "low"]
        bench.step()
        bench.add(make_request(f"high{number}", [40 + number], arrival=10 + number, max_tokens=1))
        bench.step()
    bench.finish()
    assert [identity(each) for each in seatings] == [(5, 0, 10)] * 3
    assert [len(each.token_ids) for each in seatings] == [10, 12, 14]
    assert bench.output(low) == expected_output(low)


def test_after_the_loss_of_an_executor_output_is_still_output() -> None:
    world = World(Rules(depth=1))
    request = make_request("r", list(range(10)), arrival=3, max_tokens=9, num_choices=2)
    lost = world.attach(make_capacity())
    world.send(request)
    for _ in range(4):
        world.work()
    world.remove(lost, has_died=True)
    new = world.attach(make_capacity())
    seatings: dict[int, SlotAssignment] = {}
    while world.plan(new):
        plan = world.members[new].plans[-1]
        seatings.update((each.choice_index, each) for each in plan.assigned)
        world.run(new)
    assert {index: identity(each) for index, each in seatings.items()} == {0: (3, 0, 10), 1: (3, 1, 10)}
    assert all(len(each.token_ids) > 10 for each in seatings.values())
    world.finish()


def test_requests_and_choices_that_run_together_draw_from_streams_of_their_own() -> None:
    bench = Bench()
    requests = [make_request(f"r{i}", list(range(10)), arrival=i, max_tokens=12, num_choices=2) for i in range(3)]
    bench.add(*requests)
    bench.finish()
    outputs = [tuple(bench.output(request, index)) for request in requests for index in range(2)]
    assert len(set(outputs)) == 6
