"""Something dies, freezes or leaves while 32 streams run: nothing is lost, doubled or left behind."""

from collections.abc import Sequence

import pytest

from tests.chaos.faults import Fault, short_list
from tests.chaos.history import Ending, outputs
from tests.chaos.mesh import ChaosMesh
from tests.chaos.progress import Record
from tests.chaos.runs import run_with_fault
from tests.chaos.workload import StreamSpec

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]


def test_the_streams_are_worth_comparing(specs: Sequence[StreamSpec], undisturbed: Sequence[Record]) -> None:
    """Otherwise nothing could be lost: they end in every way, and say more than a few words."""
    ends = [event for record in undisturbed for event in record.events if isinstance(event, Ending)]
    reasons = [reason for end in ends for reason in end.finish_reasons]
    assert {"stop", "length"} <= set(reasons)
    assert reasons.count("length") >= 16
    everything = [out for s, r in zip(specs, undisturbed, strict=True) for out in outputs(r.events, s.num_choices)]
    assert len({choice.text for choice in everything}) >= len(everything) - 2
    assert sum(bool(choice.logprobs) for choice in everything) >= 8


@pytest.mark.parametrize("fault", short_list(), ids=str)
async def test_a_fault_changes_nothing_that_a_client_gets(
    mesh: ChaosMesh, specs: Sequence[StreamSpec], undisturbed: Sequence[Record], fault: Fault
) -> None:
    run = await run_with_fault(mesh, specs, undisturbed, fault)
    if run.is_in_doubt:
        run = await run_with_fault(mesh, specs, undisturbed, fault)
    if run.problems:
        pytest.fail(run.report())
