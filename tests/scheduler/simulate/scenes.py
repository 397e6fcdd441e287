"""Runs of the simulator that are small enough for tests."""

from random import Random

from services.scheduler.simulate.policies import POLICIES
from services.scheduler.simulate.report import Report, sum_up
from services.scheduler.simulate.simulation import Served, Simulation
from services.scheduler.simulate.step_times import CPU
from services.scheduler.simulate.trace import TRACES, Trace, pace


def make_trace(kind: str, *, requests: int = 300, per_second: float = 4.0, seed: int = 1) -> Trace:
    """A short trace."""
    return pace(TRACES[kind](Random(seed), requests), 1 / per_second)


def simulate(trace: Trace, policy: str = "shoal", *, executors: int = 4, seed: int = 0) -> list[Served]:
    """How the requests of a trace fare under a policy."""
    return Simulation(trace, POLICIES[policy], CPU, num_executors=executors, seed=seed).run()


def figures(trace: Trace, policy: str = "shoal", *, executors: int = 4) -> Report:
    """What that comes to."""
    return sum_up(simulate(trace, policy, executors=executors), num_preemptions=0, wall_s=0.0)
