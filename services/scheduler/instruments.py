"""Every metric of a scheduler, with where its numbers are read."""

from collections import Counter
from collections.abc import Callable, Iterable

from services.scheduler.attachments import Attachments
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.requests import Requests
from shared.clock import Clock
from shared.ids import InstanceId
from shared.messages import SchedulerStatus
from shared.presence import Directory
from shared.telemetry.metrics import Instrument, Kind, Labels, Reading

OfExecutor = Callable[[Scheduler], float]
_EXECUTOR = ("executor", "model")


class ExecutorReadings:
    """Metrics that each executor has, by its name and model."""

    def __init__(self, fleet: Fleet, directory: Directory) -> None:
        self._fleet = fleet
        self._directory = directory

    def labels(self, executor_id: InstanceId) -> Labels:
        """Whose numbers they are. The name stays the same when a process is started again."""
        beat = self._directory.get(executor_id)
        return executor_id if beat is None else beat.name, self._fleet.schedulers[executor_id].capacity.model

    def of(self, number: OfExecutor) -> dict[Labels, float]:
        """A number of each executor."""
        return {self.labels(executor_id): number(each) for executor_id, each in self._fleet.schedulers.items()}

    def waiting(self) -> dict[Labels, float]:
        """Also those that wait for an executor to come."""
        held = self.of(lambda scheduler: len(scheduler.waiting))
        return held | {("", ""): self._fleet.waiting().num_choices - sum(held.values())}

    def blocks(self) -> dict[Labels, float]:
        """By state too: held, and free."""
        free = self.of(lambda scheduler: scheduler.blocks.num_free_blocks)
        total = self.of(lambda scheduler: scheduler.capacity.num_blocks)
        states = {(*labels, "held"): total[labels] - count for labels, count in free.items()}
        return states | {(*labels, "free"): count for labels, count in free.items()}

    def models(self) -> dict[str, float]:
        """How many executors each model has."""
        return dict(Counter(scheduler.capacity.model for scheduler in self._fleet.schedulers.values()))

    def num_plans(self, attachments: Attachments) -> dict[Labels, float]:
        """How many plans each was sent since it is held."""
        return {self.labels(each.executor_id): each.num_plans for each in attachments}

    def gauge(self, name: str, unit: str, help: str, number: OfExecutor, kind: Kind = Kind.SUM) -> Reading:  # noqa: A002
        """A metric that is a number of each executor."""
        return Reading(name, kind, unit, help, lambda: self.of(number), _EXECUTOR)


def scheduler_instruments(
    requests: Requests,
    fleet: Fleet,
    attachments: Attachments,
    directory: Directory,
    status: Callable[[], SchedulerStatus],
    clock: Clock,
) -> list[Instrument]:
    """The instruments of one scheduler; `status` is what its beat says."""
    executors = ExecutorReadings(fleet, directory)
    return [
        *requests.metrics.histograms,
        *_of_requests(requests, status, clock),
        *_of_tokens(requests),
        *_of_executors(executors),
        Reading(
            "shoal.scheduler.choices.waiting",
            Kind.SUM,
            "{choice}",
            "Choices that wait, preempted ones included",
            executors.waiting,
            _EXECUTOR,
        ),
        Reading(
            "shoal.scheduler.executors.lost",
            Kind.COUNTER,
            "{executor}",
            "Executors held no longer",
            lambda: requests.metrics.executors_lost.counts,
            ("reason",),
        ),
        _count("preemptions", "{choice}", "Choices that had to give up their blocks", lambda: status().num_preemptions),
        _count(
            "migrations", "{request}", "Waiting requests taken over by an idle executor", lambda: fleet.num_migrations
        ),
        _count("failovers", "{request}", "Requests that had to leave an executor", lambda: fleet.num_failovers),
        Reading(
            "shoal.scheduler.steps",
            Kind.COUNTER,
            "{step}",
            "Step plans sent",
            lambda: executors.num_plans(attachments),
            _EXECUTOR,
        ),
        _count("plans.resent", "{step}", "Plans sent once more", lambda: requests.metrics.num_plans_resent),
    ]


def _of_requests(requests: Requests, status: Callable[[], SchedulerStatus], clock: Clock) -> Iterable[Instrument]:
    metrics, delivery = requests.metrics, requests.delivery
    return (
        _count("requests.accepted", "{request}", "Attempts of requests taken in", lambda: metrics.num_accepted),
        Reading(
            "shoal.scheduler.requests",
            Kind.COUNTER,
            "{request}",
            "Attempts of requests that are over",
            lambda: metrics.ended.counts,
            ("ending", "code"),
        ),
        _sum("requests.open", "Requests whose end has not been told", lambda: delivery.num_streams),
        _sum("requests.orphaned", "Open requests whose gateway is lost", lambda: requests.orphans.num_streams),
        _sum("requests.retained", "Ended requests whose output is kept", lambda: len(requests.retention)),
        _sum("usage.unrecorded", "Requests without a record of their usage", lambda: status().num_unrecorded),
        Reading(
            "shoal.scheduler.queue.age",
            Kind.GAUGE,
            "s",
            "How long the oldest request without a step has waited",
            lambda: requests.oldest_wait_s(clock.now()),
        ),
        Reading(
            "shoal.scheduler.replays",
            Kind.COUNTER,
            "{request}",
            "Outputs said once more",
            lambda: metrics.replayed.counts,
            ("asker",),
        ),
    )


def _of_tokens(requests: Requests) -> Iterable[Instrument]:
    metrics, totals = requests.metrics, requests.totals
    return (
        Reading(
            "shoal.scheduler.prompt_tokens",
            Kind.COUNTER,
            "{token}",
            "Tokens of prompts whose request is over",
            lambda: {
                "computed": totals.num_prompt_tokens - totals.num_cached_tokens,
                "cached": totals.num_cached_tokens,
            },
            ("source",),
        ),
        _count("output_tokens", "{token}", "Tokens appended to outputs", lambda: totals.num_output_tokens),
        _count("output_tokens.unused", "{token}", "Sampled for nobody any more", lambda: metrics.num_unused_tokens),
        _count("output_tokens.cut", "{token}", "Taken back after stop strings", lambda: metrics.num_cut_tokens),
        _count("output_tokens.resumed", "{token}", "Brought along by attempts", lambda: metrics.num_resumed_tokens),
        _count("output_tokens.moved", "{token}", "Of attempts given up", lambda: metrics.num_moved_tokens),
    )


def _of_executors(executors: ExecutorReadings) -> Iterable[Instrument]:
    return (
        Reading("shoal.scheduler.executors", Kind.SUM, "{executor}", "Executors held", executors.models, ("model",)),
        executors.gauge(
            "shoal.scheduler.choices.running", "{choice}", "Choices in a slot", lambda each: len(each.running)
        ),
        executors.gauge(
            "shoal.scheduler.slots", "{choice}", "Choices that can run at once", lambda each: each.capacity.max_slots
        ),
        Reading(
            "shoal.scheduler.blocks",
            Kind.SUM,
            "{block}",
            "Blocks of KV cache",
            executors.blocks,
            (*_EXECUTOR, "state"),
        ),
        executors.gauge(
            "shoal.scheduler.blocks.cached",
            "{block}",
            "Blocks that can be found by their content",
            lambda each: each.blocks.num_cached_blocks,
        ),
        executors.gauge(
            "shoal.scheduler.blocks.pinned", "{block}", "Blocks held by pins", lambda each: each.pins.num_blocks
        ),
        executors.gauge(
            "shoal.scheduler.blocks.evicted",
            "{block}",
            "Cached blocks given to other content",
            lambda each: each.blocks.num_evictions,
            Kind.COUNTER,
        ),
        executors.gauge(
            "shoal.scheduler.blocks.eviction_age",
            "s",
            "How long those evicted lately had been of no use",
            lambda each: each.blocks.eviction_age_s,
            Kind.GAUGE,
        ),
    )


def _count(name: str, unit: str, help: str, read: Callable[[], float]) -> Reading:  # noqa: A002
    return Reading(f"shoal.scheduler.{name}", Kind.COUNTER, unit, help, read)


def _sum(name: str, help: str, read: Callable[[], float]) -> Reading:  # noqa: A002
    return Reading(f"shoal.scheduler.{name}", Kind.SUM, "{request}", help, read)
