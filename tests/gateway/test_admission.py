"""Which models there are, and who gets the next request, from beats alone."""

import pytest

from services.gateway.admission import Admission
from shared.clock import FakeClock
from shared.errors import ModelNotFound, Unavailable
from shared.ids import InstanceId, Service
from shared.messages import (
    DetokenizerStatus,
    ExecutorStatus,
    GatewayStatus,
    Presence,
    SchedulerStatus,
    Status,
    TokenizerStatus,
)
from shared.presence import DEAD_AFTER_S, Directory

STATUS: dict[Service, Status] = {
    Service.TOKENIZER: TokenizerStatus(max_model_len=128),
    Service.SCHEDULER: SchedulerStatus(),
    Service.EXECUTOR: ExecutorStatus(),
    Service.DETOKENIZER: DetokenizerStatus(),
    Service.GATEWAY: GatewayStatus(address=""),
}


class World:
    """A directory and an admission that hear the same beats."""

    def __init__(self, age_s: float = 60.0) -> None:
        self.clock = FakeClock()
        self.directory = Directory(self.clock)
        self.admission = Admission(self.directory, self.clock)
        self.clock.advance(age_s)
        self.directory.expire()

    def beat(
        self, service: Service, *models: str, name: str = "1", load: int = 0, is_draining: bool = False
    ) -> InstanceId:
        instance_id = InstanceId(f"{service}-{name}")
        status = SchedulerStatus(num_waiting=load) if service is Service.SCHEDULER else STATUS[service]
        beat = Presence(service, instance_id, instance_id, models, status, is_draining=is_draining)
        self.directory.observe(beat)
        self.admission.observe(beat)
        return instance_id

    def all_beat(self, model: str = "m", besides: Service | None = None) -> None:
        for service in STATUS:
            if service not in (besides, Service.GATEWAY):
                self.beat(service, model)


def test_model_that_nobody_names_is_not_found() -> None:
    world = World()
    world.beat(Service.GATEWAY, "m")  # a gateway's word counts for nothing
    world.all_beat("other")
    with pytest.raises(ModelNotFound, match="'n'") as caught:
        world.admission.check_model("n")
    assert caught.value.param == "model"
    assert world.admission.models() == ["other"]


def test_a_gateway_that_has_just_started_does_not_say_that_there_is_no_such_model() -> None:
    world = World(age_s=0.0)
    for _ in range(2):
        with pytest.raises(Unavailable, match="only just started") as caught:
            world.admission.check_model("m")
        assert caught.value.retry_after_s
        world.all_beat("other")  # whoever serves "m" may still be about to speak
    world.clock.advance(DEAD_AFTER_S)
    with pytest.raises(ModelNotFound):
        world.admission.check_model("m")


@pytest.mark.parametrize("missing", [Service.TOKENIZER, Service.SCHEDULER, Service.EXECUTOR, Service.DETOKENIZER])
def test_model_that_lacks_a_service_is_unavailable_and_the_service_is_named(missing: Service) -> None:
    world = World()
    world.all_beat(besides=missing)
    with pytest.raises(Unavailable, match=str(missing)) as caught:
        world.admission.check_model("m")
    assert caught.value.retry_after_s
    world.beat(missing, "m", is_draining=True)
    with pytest.raises(Unavailable):
        world.admission.check_model("m")
    world.beat(missing, "m")
    world.admission.check_model("m")


def test_vanished_model_is_unavailable_for_a_minute_then_unknown() -> None:
    world = World()
    world.all_beat()
    for _ in range(5):
        world.clock.advance(0.5)
        world.directory.expire()
    assert world.admission.models() == []
    world.admission.tick()
    with pytest.raises(Unavailable):
        world.admission.check_model("m")
    world.clock.advance(60.0)
    world.admission.tick()
    with pytest.raises(ModelNotFound):
        world.admission.check_model("m")


def test_scheduler_with_the_fewest_requests_is_chosen_counting_what_it_was_given() -> None:
    world = World()
    one = world.beat(Service.SCHEDULER, "m", name="1", load=2)
    two = world.beat(Service.SCHEDULER, "m", name="2", load=0)
    world.beat(Service.SCHEDULER, "other", name="3")
    world.beat(Service.SCHEDULER, "m", name="4", is_draining=True)
    chosen = [world.admission.choose_scheduler("m") for _ in range(6)]
    assert chosen == [two, two, one, two, one, two]
    world.beat(Service.SCHEDULER, "m", name="1", load=1)  # its own count now includes what it was given
    assert world.admission.choose_scheduler("m") == one


def test_long_model_name_is_cut_in_the_message() -> None:
    world = World()
    world.all_beat()
    with pytest.raises(ModelNotFound) as caught:
        world.admission.check_model("x" * 100_000)
    assert len(caught.value.message) < 200


def test_context_length_is_the_tokenizers() -> None:
    world = World()
    assert world.admission.max_model_len("m") is None
    world.all_beat()
    assert world.admission.max_model_len("m") == 128


def change_hands(world: World) -> None:
    """The only scheduler that holds executors drains, and another one is there."""
    world.all_beat()
    world.admission.tick()
    world.beat(Service.SCHEDULER, is_draining=True)
    world.beat(Service.SCHEDULER, name="2")


def test_a_model_whose_executors_are_changing_hands_counts_as_served() -> None:
    world = World()
    change_hands(world)
    assert world.admission.missing("m") == []
    world.admission.check_model("m")
    assert world.admission.choose_scheduler("m") is None, "not at this moment"
    two = world.beat(Service.SCHEDULER, "m", name="2")
    assert world.admission.choose_scheduler("m") == two


def test_executors_that_nobody_takes_for_long_are_missing() -> None:
    world = World()
    change_hands(world)
    for _ in range(10):
        world.clock.advance(0.5)
        world.admission.tick()
    assert world.admission.missing("m") == [Service.EXECUTOR]
    with pytest.raises(Unavailable):
        world.admission.check_model("m")


def test_executors_that_nobody_has_taken_yet_are_missing() -> None:
    world = World()
    world.all_beat(besides=Service.SCHEDULER)
    world.beat(Service.SCHEDULER)
    world.admission.tick()
    assert world.admission.missing("m") == [Service.EXECUTOR]


@pytest.mark.parametrize("service", [Service.TOKENIZER, Service.EXECUTOR, Service.DETOKENIZER])
def test_while_hands_change_nothing_else_may_be_missing(service: Service) -> None:
    world = World()
    change_hands(world)
    world.beat(service, "m", is_draining=True)
    assert service in world.admission.missing("m")


def test_without_anybody_to_take_them_executors_do_not_change_hands() -> None:
    world = World()
    change_hands(world)
    world.beat(Service.SCHEDULER, name="2", is_draining=True)
    assert world.admission.missing("m") == [Service.SCHEDULER]
