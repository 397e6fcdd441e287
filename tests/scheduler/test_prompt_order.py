"""The order in which prompts that have slots are computed: it is the queue's, so that a seat is no privilege."""

from shared.ids import RequestId
from shared.messages import ChoiceTokens
from tests.scheduler.driver import Bench, make_capacity, make_request


def test_a_tenant_that_was_served_less_goes_on_before_prompts_that_were_seated_earlier() -> None:
    bench = Bench(make_capacity(num_blocks=256, max_step_tokens=16))
    bench.add(*(make_request(f"flood-{k}", list(range(k, k + 60)), arrival=k, tenant="flood") for k in range(5)))
    bench.step()
    bench.add(make_request("modest", list(range(100, 160)), arrival=5, tenant="modest"))
    bench.finish()
    first_tokens = [event.request_id for event in bench.events if isinstance(event, ChoiceTokens) and event.offset == 0]
    assert first_tokens.index(RequestId("modest")) <= 1  # the flood's first had begun before


def test_of_one_tenant_whoever_came_first_goes_on_first() -> None:
    bench = Bench(make_capacity(num_blocks=256, max_step_tokens=16))
    bench.add(*(make_request(str(k), list(range(k, k + 60)), arrival=k) for k in range(5)))
    plan = bench.step()
    assert plan is not None
    assert plan.counts[list(plan.slots).index(plan.assigned[0].slot)] == max(plan.counts)
