"""Threads that carry out a kernel together: every piece once, phases in order, and an end."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from services.executor.kernels.jit import Longs, single
from services.executor.kernels.team import Team, Words, barrier, claim, first_step, next_step

NUM_PHASES, NUM_PIECES = 50, 7


@single
def _take_part(team: Words, thread: int, counts: Longs, errors: Longs) -> None:
    for phase in range(50):
        piece = claim(team, phase)
        while piece < 7:
            if phase > 0 and counts[phase - 1].sum() != 7 * counts[phase - 1, 0]:
                errors[0] += 1  # somebody is still busy with the phase before
            counts[phase, piece] += 1
            piece = claim(team, phase)
        barrier(team)


@single
def kernel(team: Words, thread: int, counts: Longs, errors: Longs) -> None:
    """As `Team` wants it."""
    step = first_step(team, thread)
    while step >= 0:
        _take_part(team, thread, counts, errors)
        step = next_step(team, thread, step)


@pytest.fixture
def counts() -> Longs:
    return np.zeros((NUM_PHASES, NUM_PIECES), np.int64)


@pytest.fixture(params=[1, 2, 3])
def team(request: pytest.FixtureRequest, counts: Longs) -> Iterator[Team]:
    errors = np.zeros(1, np.int64)
    team = Team(kernel, (counts, errors), num_threads=request.param, num_phases=NUM_PHASES)
    yield team
    team.close()
    assert errors[0] == 0


def test_every_piece_of_every_phase_is_done_once_a_step(team: Team, counts: Longs) -> None:
    for step in range(1, 21):
        team.run()
        assert np.all(counts == step)


def test_helpers_end_with_the_team_and_it_may_go_on(team: Team, counts: Longs) -> None:
    before = threading.active_count()
    team.run()
    assert threading.active_count() == before + team.num_threads - 1
    team.close()
    assert threading.active_count() == before
    team.run()
    assert np.all(counts == 2)


def test_a_team_that_nobody_uses_any_more_ends_its_helpers(counts: Longs) -> None:
    team = Team(kernel, (counts, np.zeros(1, np.int64)), num_threads=2, num_phases=NUM_PHASES)
    team.run()
    (helper,) = (thread for thread in threading.enumerate() if thread.name == "compute-1")
    del team
    helper.join(timeout=10)
    assert not helper.is_alive()
