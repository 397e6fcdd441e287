"""What an executor with nothing left to start takes from others: what it can hold, wherever that waits."""

from collections.abc import Sequence

from services.scheduler.core.fleet import Fleet
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from shared.ids import InstanceId
from tests.scheduler.driver import make_capacity, make_request
from tests.scheduler.herd import A, B, Herd, make_scheduler

C = InstanceId("executor-c")


class Picky:
    """Places each request on the first executor, and lets only some move."""

    def __init__(self, *movable: str) -> None:
        self._movable = movable
        self.asked: list[str] = []

    def choose(self, request: Request, able: Sequence[Scheduler]) -> Scheduler:
        return able[0]

    def should_move(self, request: Request, busy: Scheduler, idle: Scheduler) -> bool:
        self.asked.append(request.request_id)
        return request.request_id in self._movable


def test_a_small_executor_takes_what_fits_from_behind_any_number_that_do_not(herd: Herd) -> None:
    herd.attach(A, make_capacity(num_blocks=256, max_slots=1))
    herd.fleet.add(make_request("runs", [1] * 8, max_tokens=600))
    herd.step()
    for number in range(40):
        herd.fleet.add(make_request(f"large{number}", [number] * 100, arrival=1 + number, max_tokens=100))
    small = [make_request(f"small{number}", [number] * 8, arrival=100 + number) for number in range(10)]
    for request in small:
        herd.fleet.add(request)
    herd.attach(B, make_capacity(num_blocks=16))
    for _ in range(40):
        herd.step()
    assert all(request.request_id in herd.ends for request in small)


def test_what_fits_is_found_on_another_executor_if_the_busiest_has_nothing() -> None:
    herd = Herd()
    herd.attach(A, make_capacity(num_blocks=256, max_slots=1))
    for number in range(6):
        herd.fleet.add(make_request(f"large{number}", [number] * 100, arrival=number, max_tokens=100))
    herd.attach(C, make_capacity(num_blocks=32, max_slots=1))
    scheduler = herd.fleet.schedulers[C]
    herd.fleet._placement = Picky("small2")
    for number in range(3):
        request = make_request(f"small{number}", [number] * 8, arrival=10 + number, max_tokens=20)
        herd.fleet._requests[request.request_id] = request
        herd.fleet._set_home(request, scheduler)
        scheduler.add(request)
    herd.attach(B, make_capacity(num_blocks=16))
    assert herd.fleet.schedule(B) is not None
    assert [choice.request.request_id for choice in herd.fleet.schedulers[B].running] == ["small2"]


def test_four_are_compared_before_the_next_executor_is_looked_at() -> None:
    placement = Picky("r9")
    fleet = Fleet(make_scheduler, placement=placement)
    fleet.add_executor(A, make_capacity(num_blocks=256, max_slots=1))
    for number in range(9):
        fleet.add(make_request(f"r{number}", [number] * 8, arrival=number))
    fleet.add_executor(B, make_capacity())
    assert fleet.schedule(B) is None
    assert placement.asked == ["r0", "r1", "r2", "r3"]


def test_no_more_than_sixteen_are_compared_however_many_wait_on_however_many_executors() -> None:
    placement = Picky()
    fleet = Fleet(make_scheduler, placement=placement)
    for number in range(8):
        fleet.add_executor(InstanceId(f"busy{number}"), make_capacity(num_blocks=256, max_slots=1))
    for number in range(64):
        request = make_request(f"r{number}", [number % 50] * 8, arrival=number)
        home = fleet.schedulers[InstanceId(f"busy{number % 8}")]
        fleet._requests[request.request_id] = request
        fleet._set_home(request, home)
        home.add(request)
    fleet.add_executor(A, make_capacity())
    assert fleet.schedule(A) is None
    assert len(placement.asked) == 16
    assert len({int(name[1:]) % 8 for name in placement.asked}) == 4
