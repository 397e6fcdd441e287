"""A client's request, checked and said in the mesh's terms: what the endpoints' bodies become."""

from dataclasses import dataclass
from enum import Enum

import msgspec

from shared.ids import InstanceId, RequestId, new_seed
from shared.messages import Prompt, SubmitRequest, TextOptions, TraceContext
from shared.sampling import SamplingParams


class Endpoint(Enum):
    """Which of OpenAI's two ways of asking; decides the shape of the answer."""

    CHAT = "chat"
    COMPLETION = "completion"

    @property
    def operation(self) -> str:
        """What it is called in OpenTelemetry's conventions."""
        return "chat" if self is Endpoint.CHAT else "text_completion"

    def answer_id(self, request_id: RequestId) -> str:
        """How the answer to a request is named in its own shape."""
        return f"{'chatcmpl' if self is Endpoint.CHAT else 'cmpl'}-{request_id.removeprefix('req-')}"


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
        trace: TraceContext | None = None,
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
            trace=trace,
        )
