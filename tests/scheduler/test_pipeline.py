"""The steps in flight: what is on its way of each choice, and which tokens of a result are whose."""

from array import array

import pytest

from services.scheduler.core.budget import StepShape
from services.scheduler.core.pipeline import Pipeline, StepMismatch
from services.scheduler.core.request import Choice
from shared.messages import RowFailure, StepResult
from tests.scheduler.driver import make_request


def in_flight(pipeline: Pipeline, choices: list[Choice], max_drafts: list[int] | None = None) -> None:
    """One more step in which all of them sample, and some may guess."""
    pipeline.add(choices, StepShape(len(choices), 0), array("i", max_drafts or []))
    for choice, num_drafts in zip(choices, max_drafts or [0] * len(choices), strict=True):
        choice.num_in_flight += 1
        choice.num_drafts_in_flight += num_drafts


def two_choices() -> list[Choice]:
    return [make_request(name, [1, 2]).choices[0] for name in "ab"]


def test_what_a_result_answers_is_in_flight_no_more() -> None:
    choices, pipeline = two_choices(), Pipeline()
    in_flight(pipeline, choices, [3, 0])
    in_flight(pipeline, choices)
    pipeline.take(StepResult(1, array("i", [7, 8])))
    assert [(choice.num_in_flight, choice.num_drafts_in_flight) for choice in choices] == [(1, 0), (1, 0)]
    pipeline.take(StepResult(2, array("i", [7, 8])))
    assert [choice.num_in_flight for choice in choices] == [0, 0]
    assert not pipeline


def test_a_result_that_does_not_fit_leaves_everything_in_flight() -> None:
    choices, pipeline = two_choices(), Pipeline()
    in_flight(pipeline, choices, [3, 0])
    for result in (StepResult(2, array("i", [7, 8])), StepResult(1, array("i", [7]))):
        with pytest.raises(StepMismatch):
            pipeline.take(result)
    assert [(choice.num_in_flight, choice.num_drafts_in_flight) for choice in choices] == [(1, 3), (1, 0)]
    assert len(pipeline) == 1


def test_nothing_is_in_flight_of_steps_that_were_abandoned() -> None:
    choices, pipeline = two_choices(), Pipeline()
    in_flight(pipeline, choices, [3, 0])
    pipeline.abandon()
    assert [(choice.num_in_flight, choice.num_drafts_in_flight) for choice in choices] == [(0, 0), (0, 0)]
    assert not pipeline


@pytest.mark.parametrize("failed", [None, 0, 1])
def test_a_row_has_the_tokens_up_to_the_one_that_failed(failed: int | None) -> None:
    choices, pipeline = two_choices(), Pipeline()
    in_flight(pipeline, choices, [3, 0])
    failures = () if failed is None else (RowFailure(failed, "no numbers"),)
    result = StepResult(
        1,
        array("i", [7, 8, 9]),
        failures=failures,
        num_tokens=array("i", [2, 1]),
        num_drafted=array("i", [3, 0]),
    )
    rows = list(pipeline.take(result).rows(result))
    assert [choice for choice, *_ in rows] == choices
    tokens = [[7, 8], [9]] if failed is None else [[7], [9]] if failed == 0 else [[7, 8], []]
    assert [list(token_ids) for _, token_ids, *_ in rows] == tokens
    assert [reason for *_, reason in rows] == ["no numbers" if row == failed else None for row in range(2)]


def test_a_failure_of_a_row_that_is_not_in_the_step_means_nothing() -> None:
    choices, pipeline = two_choices(), Pipeline()
    in_flight(pipeline, choices)
    result = StepResult(1, array("i", [7, 8]), failures=(RowFailure(2, "no numbers"),))
    rows = list(pipeline.take(result).rows(result))
    assert [(list(token_ids), reason) for _, token_ids, _, reason in rows] == [([7], None), ([8], None)]
