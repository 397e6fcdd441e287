"""What the scheduler tells of a request: its phases, its interruptions, and how it ended."""

from typing import Any

import pytest

from services.scheduler.config import SchedulerConfig
from shared.ids import InstanceId, RequestId
from shared.messages import (
    CancelRequest,
    FinishReason,
    Outcome,
    ResumedChoice,
    RunStep,
    Span,
    StopStringFound,
    TraceContext,
    int32s,
)
from shared.telemetry import names
from tests.scheduler.driver import make_capacity
from tests.scheduler.fake_executor import undisturbed_output
from tests.scheduler.harness import EXECUTOR, GATEWAY, PROMPT, ExecutorPeer, Mesh

R = RequestId("r")
CONTEXT = TraceContext(bytes(range(16)), bytes(range(8)), is_sampled=True, state="vendor=1")
SECOND_NS = 1_000_000_000


def spans(mesh: Mesh, name: str | None = None, request_id: str = "r") -> list[Span]:
    """What is kept of a request, by start."""
    kept = mesh.tracing.store.find(RequestId(request_id))
    found = [] if kept is None else [span for span in kept.spans if name in (None, span.name)]
    return sorted(found, key=lambda span: span.start_ns)


def open_names(mesh: Mesh, request_id: str = "r") -> list[str]:
    """What goes on of a request."""
    going_on = [span for spans_of in mesh.tracing.open_spans for span in spans_of(RequestId(request_id))]
    assert all(span.end_ns == 0 for span in going_on)
    return sorted(span.name for span in going_on)


async def submit(mesh: Mesh, name: str = "r", **fields: Any) -> None:
    await mesh.submit(name, trace=CONTEXT, owner="acme", **fields)


async def work_by_hand(mesh: Mesh, executor: ExecutorPeer, num_steps: int) -> None:
    """Have an executor run the next steps that it was given, and no more."""
    for _ in range(num_steps):
        await mesh.until(lambda: len(executor.of(RunStep)) > executor.fake.last_step_id)
        await executor.run(executor.of(RunStep)[executor.fake.last_step_id])
        await mesh.settle()


async def go_on(mesh: Mesh) -> None:
    """Have the executor run what it was given, and all that follows."""
    mesh.executor.is_working = True
    for message in mesh.executor.of(RunStep)[mesh.executor.fake.last_step_id :]:
        await mesh.executor.run(message)


async def test_a_request_waits_computes_its_prompt_and_decodes(mesh: Mesh) -> None:
    await mesh.ready()
    await submit(mesh, max_tokens=5)
    await mesh.until(mesh.detokenizer.closed)
    queue, prefill, decode = spans(mesh)
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert all(span.context == CONTEXT and span.request_id == "r" for span in (queue, prefill, decode))
    assert queue.attributes == {names.ATTEMPT: 1, names.PROMPT_TOKENS: len(PROMPT), names.PRIORITY: 0}
    assert prefill.attributes == {
        names.ATTEMPT: 1,
        names.EXECUTOR: EXECUTOR,
        names.STEP_ID: 1,
        names.CHUNK_START: 0,
        names.CHUNK_TOKENS: len(PROMPT),
    }
    assert decode.attributes == {
        names.ATTEMPT: 1,
        names.DECODE_TOKENS: 5,
        names.DECODE_STEPS: 5,
        names.DECODE_DRAFTS: 0,
        names.DECODE_DRAFTS_RIGHT: 0,
        names.EXECUTOR: EXECUTOR,
        names.OUTCOME: "completed",
    }
    assert queue.end_ns <= prefill.start_ns <= prefill.end_ns <= decode.start_ns <= decode.end_ns
    kept = mesh.tracing.store.find(R)
    assert kept is not None
    assert kept.owner == "acme"
    assert open_names(mesh) == []


async def test_the_wait_for_the_first_step_is_as_long_as_it_was(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("first")
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    await submit(mesh)
    await mesh.settle()
    assert open_names(mesh) == ["queue"], "the pipeline is full"
    mesh.clock.advance(1.5)
    await work_by_hand(mesh, mesh.executor, 1)
    (queue,) = spans(mesh)
    assert queue.name == "queue"
    assert queue.end_ns - queue.start_ns == pytest.approx(1.5 * SECOND_NS, abs=SECOND_NS)


async def test_the_executor_is_told_of_the_trace_and_so_is_the_detokenizer(mesh: Mesh) -> None:
    await mesh.ready()
    await submit(mesh)
    await mesh.until(mesh.detokenizer.closed)
    (assignment,) = mesh.executor.of(RunStep)[0].plan.assigned
    assert assignment.trace == TraceContext(CONTEXT.trace_id, CONTEXT.span_id, True), "its links need no state"
    assert [opened.trace for opened in mesh.detokenizer.opened("r")] == [CONTEXT]


async def test_without_a_context_nothing_is_told_of_a_request(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    assert spans(mesh) == []
    assert mesh.executor.of(RunStep)[0].plan.assigned[0].trace is None


async def test_what_goes_on_is_told_of_as_such(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await submit(mesh)
    await work_by_hand(mesh, mesh.executor, 2)
    assert [span.name for span in spans(mesh)] == ["queue", "prefill"]
    assert open_names(mesh) == ["decode"]
    assert open_names(mesh, "another") == []


@pytest.mark.parametrize("mesh", [SchedulerConfig(max_chunk_tokens=4)], indirect=True)
async def test_a_prompt_in_parts_has_a_span_for_each(mesh: Mesh) -> None:
    await mesh.ready()
    await submit(mesh)
    await mesh.until(mesh.detokenizer.closed)
    chunks = [
        (span.attributes[names.CHUNK_START], span.attributes[names.CHUNK_TOKENS]) for span in spans(mesh, "prefill")
    ]
    assert sorted(chunks) == [(0, 4), (4, 4), (8, 3)]


@pytest.mark.parametrize("mesh", [SchedulerConfig(max_chunk_tokens=1, prefix_cache=False)], indirect=True)
async def test_of_very_many_parts_the_last_share_a_span(mesh: Mesh) -> None:
    await mesh.ready()
    await submit(mesh, prompt=list(range(1, 91)), max_tokens=2)
    await mesh.until(mesh.detokenizer.closed)
    chunks = spans(mesh, "prefill")
    assert len(chunks) == 64
    (rest,) = [span for span in chunks if names.NUM_CHUNKS in span.attributes]
    assert (rest.attributes[names.NUM_CHUNKS], rest.attributes[names.CHUNK_TOKENS]) == (27, 27)
    assert sum(int(str(span.attributes[names.CHUNK_TOKENS])) for span in chunks) == 90


async def test_outputs_that_go_on_beside_a_prompt_are_no_part_of_its_spans(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await submit(mesh, "first", max_tokens=20)
    await work_by_hand(mesh, mesh.executor, 2)
    await submit(mesh, "second", prompt=[40] * 9, max_tokens=20)
    await mesh.settle()
    await go_on(mesh)
    await mesh.until(lambda: len(mesh.detokenizer.closed()) == 2)
    assert [len(spans(mesh, "prefill", name)) for name in ("first", "second")] == [1, 1]


async def test_guesses_are_counted(mesh: Mesh) -> None:
    mesh.executor.capacity = make_capacity(max_draft_tokens=3)
    mesh.executor.restart()
    await mesh.ready()
    await submit(mesh, max_tokens=60)
    await mesh.until(mesh.detokenizer.closed)
    (decode,) = spans(mesh, "decode")
    tokens, steps, drafts, right = (
        int(str(decode.attributes[name]))
        for name in (names.DECODE_TOKENS, names.DECODE_STEPS, names.DECODE_DRAFTS, names.DECODE_DRAFTS_RIGHT)
    )
    assert tokens == 60
    assert 0 < right <= drafts
    assert steps + right == tokens
    assert steps <= len(mesh.executor.of(RunStep))


async def test_choices_are_told_apart(mesh: Mesh) -> None:
    await mesh.ready()
    await submit(mesh, num_choices=2, max_tokens=4)
    await mesh.until(mesh.detokenizer.closed)
    assert [span.attributes[names.CHOICE] for span in spans(mesh, "prefill")] == [0, 1]
    (decode,) = spans(mesh, "decode")
    assert decode.attributes[names.DECODE_TOKENS] == 8


async def test_who_gives_way_is_told_of_until_it_runs_again(mesh: Mesh) -> None:
    mesh.executor.capacity = make_capacity(max_slots=1)
    mesh.executor.restart()
    await mesh.ready()
    mesh.executor.is_working = False
    await submit(mesh, "low", priority=1, max_tokens=10)
    await work_by_hand(mesh, mesh.executor, 2)
    await submit(mesh, "high", prompt=[40] * 6, max_tokens=3)
    await work_by_hand(mesh, mesh.executor, 3)
    assert open_names(mesh, "low") == ["decode", "preempted"]
    await go_on(mesh)
    await mesh.until(lambda: len(mesh.detokenizer.closed()) == 2)
    (preempted,) = spans(mesh, "preempted", "low")
    assert preempted.attributes == {names.ATTEMPT: 1, names.EXECUTOR: EXECUTOR}
    again = spans(mesh, "prefill", "low")[-1]
    assert again.start_ns >= preempted.end_ns, "what was lost is computed once more"
    assert spans(mesh, "preempted", "high") == []


async def test_a_choice_that_has_ended_is_not_preempted(mesh: Mesh) -> None:
    """Its slot is given back by a later plan, as that of one that gives way."""
    await mesh.ready()
    mesh.executor.is_working = False
    await submit(mesh, num_choices=2, max_tokens=9)
    await work_by_hand(mesh, mesh.executor, 3)
    assert len(mesh.detokenizer.entries("r")) > 2
    await mesh.gateway.send(StopStringFound(R, 1, 1))
    await go_on(mesh)
    await mesh.until(mesh.detokenizer.closed)
    assert any(message.plan.released for message in mesh.executor.of(RunStep))
    assert mesh.detokenizer.closed()[0].usage.num_output_tokens == (9, 1)
    assert spans(mesh, "preempted") == []


async def test_the_loss_of_an_executor_is_told_of_until_another_goes_on(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await submit(mesh)
    await work_by_hand(mesh, mesh.executor, 2)
    for _ in range(8):
        await mesh.detokenizer.announce()
        await mesh.pass_time(0.25)
    assert mesh.service.models() == ()
    assert open_names(mesh) == ["decode", "migration"]
    other = ExecutorPeer(mesh.broker, InstanceId("executor-2"))
    await other.start()
    await other.announce()
    await mesh.until(mesh.detokenizer.closed)
    (migration,) = spans(mesh, "migration")
    assert migration.attributes == {names.ATTEMPT: 1, names.EXECUTOR: EXECUTOR, names.REASON: "executor_lost"}
    assert [span.attributes[names.EXECUTOR] for span in spans(mesh, "prefill")] == [EXECUTOR, "executor-2"]
    (decode,) = spans(mesh, "decode")
    assert decode.attributes[names.EXECUTOR] == "executor-2"
    assert decode.attributes[names.DECODE_TOKENS] == 5
    await other.transport.close()


async def test_a_prompt_that_an_executor_took_with_it_is_an_error(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await submit(mesh)
    await mesh.until(lambda: mesh.executor.of(RunStep))
    for _ in range(8):
        await mesh.detokenizer.announce()
        await mesh.pass_time(0.25)
    (prefill,) = spans(mesh, "prefill")
    assert prefill.attributes[names.ERROR_TYPE] == "executor_lost"


async def test_a_request_that_is_cancelled_while_it_waits_has_a_wait_and_nothing_else(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("first")
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    await submit(mesh)
    await mesh.gateway.send(CancelRequest(R, GATEWAY))
    await mesh.until(mesh.detokenizer.closed)
    (queue,) = spans(mesh)
    assert (queue.name, queue.attributes[names.OUTCOME]) == ("queue", "cancelled")
    assert names.ERROR_TYPE not in queue.attributes
    assert open_names(mesh) == []


async def test_a_request_whose_time_is_over_ends_with_an_error(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await submit(mesh, timeout_ms=1000)
    await work_by_hand(mesh, mesh.executor, 2)
    await mesh.pass_time(1.25)
    (decode,) = spans(mesh, "decode")
    assert decode.attributes[names.OUTCOME] == "failed"
    assert decode.attributes[names.ERROR_TYPE] == "deadline_exceeded"
    assert decode.end_ns - decode.start_ns == pytest.approx(1.25 * SECOND_NS, abs=SECOND_NS)


async def test_a_request_that_ends_without_a_slot_ends_its_wait(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await submit(mesh)
    await work_by_hand(mesh, mesh.executor, 1)
    for _ in range(8):
        await mesh.detokenizer.announce()
        await mesh.pass_time(0.25)
    await mesh.gateway.send(CancelRequest(R, GATEWAY))
    await mesh.until(mesh.detokenizer.closed)
    (migration,) = spans(mesh, "migration")
    assert migration.attributes[names.OUTCOME] == "cancelled"


@pytest.mark.parametrize("mesh", [SchedulerConfig(max_waiting_requests=1)], indirect=True)
async def test_a_refusal_is_told_of(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    for name in ("running", "planned", "waiting"):
        await mesh.submit(name)
        await mesh.settle()
    await submit(mesh)
    await mesh.settle()
    (queue,) = spans(mesh)
    assert (queue.name, queue.attributes) == ("queue", {names.ATTEMPT: 1, names.ERROR_TYPE: "queue_full"})


async def test_a_later_attempt_ends_what_an_earlier_one_was_doing(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await submit(mesh)
    await work_by_hand(mesh, mesh.executor, 2)
    resumed = (ResumedChoice(int32s(undisturbed_output(PROMPT, 0, 0, 2))),)
    await submit(mesh, attempt=2, resumed=resumed)
    await mesh.settle()
    await go_on(mesh)
    await mesh.until(mesh.detokenizer.closed)
    first, second = spans(mesh, "decode")
    assert (first.attributes[names.ATTEMPT], first.attributes[names.OUTCOME]) == (1, "given_up")
    assert (second.attributes[names.ATTEMPT], second.attributes[names.OUTCOME]) == (2, "completed")
    assert second.attributes[names.DECODE_TOKENS] == 3, "two came along"
    assert len(spans(mesh, "queue")) == 2
    assert spans(mesh, "preempted") == [], "whose slots these were is another request"


async def test_an_attempt_of_which_only_the_end_was_missing_has_no_output(mesh: Mesh) -> None:
    await mesh.ready()
    whole = ResumedChoice(int32s(undisturbed_output(PROMPT, 0, 0, 5)), FinishReason.LENGTH)
    await submit(mesh, attempt=2, resumed=(whole,))
    await mesh.until(mesh.detokenizer.closed)
    (queue,) = spans(mesh)
    assert (queue.name, queue.attributes[names.OUTCOME]) == ("queue", "completed")


async def test_a_stop_string_ends_the_output(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await submit(mesh, max_tokens=50)
    await work_by_hand(mesh, mesh.executor, 4)
    await mesh.gateway.send(StopStringFound(R, 0, 3))
    await mesh.until(mesh.detokenizer.closed)
    assert mesh.detokenizer.closed()[0].outcome is Outcome.COMPLETED
    (decode,) = spans(mesh, "decode")
    assert decode.attributes[names.DECODE_TOKENS] == 3


async def test_what_goes_on_when_a_scheduler_leaves_is_handed_over(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await submit(mesh)
    await work_by_hand(mesh, mesh.executor, 2)
    await mesh.service.on_stop()
    (decode,) = spans(mesh, "decode")
    assert decode.attributes[names.OUTCOME] == "handed_over"
    assert open_names(mesh) == []
