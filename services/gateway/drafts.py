"""A client's request, checked and said in the mesh's terms: what the endpoints' bodies become."""

from dataclasses import dataclass
from enum import Enum

import msgspec

from shared.ids import InstanceId, RequestId, new_seed
from shared.messages import Prompt, SubmitRequest, TextOptions
from shared.sampling import SamplingParams


class Endpoint(Enum):
    """Which of OpenAI's two ways of asking; decides the shape of the answer."""

    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How the answer to one client request looks."""

    endpoint: Endpoint
    num_choices: int
    """For each prompt; more may be generated, of which these are the best."""
    has_logprobs: bool
    """Whether the client sees them."""
    is_stream: bool
    includes_usage: bool
    """Whether a stream ends with what the request consumed."""
    is_resumable: bool = False
    """Whether the request outlives a connection that breaks."""


def sibling_ids(first: RequestId, count: int) -> list[RequestId]:
    """The ids of the `count` requests to the mesh that one client request becomes, `first` and those derived from it.

    So `first` alone is enough to find all of them again.
    """
    return [first, *(RequestId(f"{first}-{number}") for number in range(1, count))]


@dataclass(frozen=True, slots=True)
class Draft:
    """What one client request asks for. Each prompt becomes one request to the mesh."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    """Its seed counts only if `has_seed`."""
    has_seed: bool
    text: TextOptions
    num_choices: int
    """To generate for each prompt."""
    max_tokens: int | None
    ignore_eos: bool
    priority: int | None
    """None: whatever is usual for who asks."""
    timeout_ms: int | None
    answer: AnswerOptions

    def submission(
        self,
        prompt: Prompt,
        request_id: RequestId,
        *,
        gateway_id: InstanceId,
        scheduler_id: InstanceId,
        tenant: str,
        priority: int,
        owner: str = "",
        client: bytes = b"",
    ) -> SubmitRequest:
        """The message that asks for `prompt`; without a seed from the client, every submission has its own."""
        sampling = self.sampling if self.has_seed else msgspec.structs.replace(self.sampling, seed=new_seed())
        return SubmitRequest(
            request_id=request_id,
            gateway_id=gateway_id,
            scheduler_id=scheduler_id,
            model=self.model,
            tenant=tenant,
            prompt=prompt,
            sampling=sampling,
            text=self.text,
            num_choices=self.num_choices,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            priority=priority,
            timeout_ms=self.timeout_ms,
            owner=owner,
            client=client,
        )
