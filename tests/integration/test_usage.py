"""Usage records of a whole mesh: every accepted request has one, with what its client got."""

import asyncio

from shared.codec import Decoder
from shared.messages import USAGE_LEDGER, Outcome, UsageRecord
from tests.integration.in_process import MODEL, PATIENCE_S, InProcessMesh


async def recorded(mesh: InProcessMesh, count: int) -> list[UsageRecord]:
    """The records, once there are so many and none is on its way."""
    async with asyncio.timeout(PATIENCE_S):
        while len(mesh.broker.ledgers[USAGE_LEDGER].payloads) < count or mesh.gateway.status().num_unrecorded:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    decoder = Decoder[UsageRecord](UsageRecord)
    return [decoder.decode(payload) for payload in mesh.broker.ledgers[USAGE_LEDGER].payloads.values()]


async def test_a_completed_request_is_recorded_with_what_its_client_was_told(mesh: InProcessMesh) -> None:
    answer = await mesh.complete(prompt="The river runs past the mill", max_tokens=12, n=2, ignore_eos=True, seed=1)
    (record,) = await recorded(mesh, 1)
    assert (record.outcome, record.tenant, record.model) == (Outcome.COMPLETED, "default", MODEL)
    assert record.usage.num_prompt_tokens == answer["usage"]["prompt_tokens"]
    assert record.usage.num_output_tokens == (12, 12)
    assert record.recorded_by == "gateway-1"


async def test_a_request_whose_client_left_is_recorded_as_cancelled(mesh: InProcessMesh) -> None:
    body = {"model": MODEL, "prompt": "The river", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with mesh.session.post(f"{mesh.url}/v1/completions", json=body) as answer:
        await answer.content.readline()
        answer.close()
    (record,) = await recorded(mesh, 1)
    assert record.outcome is Outcome.CANCELLED
    assert 0 < sum(record.usage.num_output_tokens) < 1500


async def test_a_refused_request_is_not_recorded(mesh: InProcessMesh) -> None:
    body = {"model": MODEL, "prompt": "The river", "max_tokens": 1_000_000}
    async with mesh.session.post(f"{mesh.url}/v1/completions", json=body) as answer:
        assert answer.status == 400
    await mesh.complete(prompt="The river", max_tokens=1)
    assert len(await recorded(mesh, 1)) == 1


async def test_serving_goes_on_while_nothing_can_be_recorded(mesh: InProcessMesh) -> None:
    mesh.broker.keeps_records = False
    for _ in range(3):
        await mesh.complete(prompt="The river", max_tokens=2)
    assert mesh.gateway.status().num_unrecorded == 3
    mesh.broker.keeps_records = True
    assert len(await recorded(mesh, 3)) == 3
