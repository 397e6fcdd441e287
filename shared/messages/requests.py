"""Submission: gateway → tokenizer → scheduler, and what comes back to the gateway when a request is taken or refused.

Submission is idempotent by request id and attempt, so a sender that hears nothing sends again. A request whose
scheduler is lost is submitted to another one as its next attempt, with the output it has so far. Output that is missing
is asked for again (`ReplayRequest`), and a gateway takes over what another one left behind (`FindRequest`, then
`AdoptRequest`).

Also the two questions a gateway asks a tokenizer on behalf of `/tokenize` and `/detokenize`.
"""

from typing import Any

from shared.errors import RequestError
from shared.ids import InstanceId, RequestId
from shared.messages.base import FinishReason, Int32Array, Message, int32s
from shared.messages.steps import TokenLogprobs
from shared.messages.traces import TraceContext
from shared.sampling import SamplingParams


class ErrorInfo(Message, frozen=True):
    """A `RequestError` on the wire, in OpenAI's terms plus the HTTP status."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @staticmethod
    def of(error: RequestError) -> "ErrorInfo":
        """The error as a message."""
        return ErrorInfo(error.status, error.type, error.code, error.message, error.param, error.retry_after_s)


class ChatMessage(Message, frozen=True):
    """One turn of a conversation; `content` is text, with the parts of a multi-part content already joined."""

    role: str
    content: str
    name: str | None = None


class ChatPrompt(Message, frozen=True, tag="chat"):
    """A conversation for the model's chat template."""

    messages: tuple[ChatMessage, ...]
    template_arguments: dict[str, Any] = {}
    """Further variables for the template, such as `enable_thinking`."""
    parse_special_tokens: bool = False
    """Whether the text of a control token inside a message becomes that token."""


class TextPrompt(Message, frozen=True, tag="text"):
    """Raw text that the model continues."""

    text: str
    parse_special_tokens: bool = True


class TokenPrompt(Message, frozen=True, tag="tokens"):
    """Token ids that the model continues, exactly as given."""

    token_ids: Int32Array


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class TextOptions(Message, frozen=True):
    """How the detokenizer turns one request's tokens into text."""

    stop: tuple[str, ...] = ()
    """Strings that end a choice; the text stops before them."""
    skip_special_tokens: bool = True
    context_token_ids: Int32Array = int32s()
    """The end of the prompt, for decoders whose first token depends on what precedes it. Empty: decode by itself."""


class ResumedChoice(Message, frozen=True):
    """What is known of one choice of a request that goes on at another scheduler."""

    token_ids: Int32Array = int32s()
    finish_reason: FinishReason | None = None
    """Set if the choice has ended: these are all its tokens."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One for each token if log-probabilities were asked for, or none at all if they were too many to travel."""


class RequestPast(Message, frozen=True):
    """What a request has behind it that goes on elsewhere: to its client all of its attempts are one request.

    None where nobody knows, or where it has not come to that yet.
    """

    age_s: float = 0.0
    """Since its first scheduler took it, or, if none had, since it came to its gateway."""
    queue_s: float | None = None
    """Of these, until its first step."""
    first_token_s: float | None = None
    """Of these, until its first output token."""
    num_cached_tokens: int | None = None
    """Of the prompt, found in the prefix cache when it first ran."""


class SubmitRequest(Message, frozen=True, tag="submit_request"):
    """Gateway → tokenizer: encode this prompt and hand it to `scheduler_id`."""

    request_id: RequestId
    gateway_id: InstanceId
    scheduler_id: InstanceId
    model: str
    tenant: str
    prompt: Prompt
    sampling: SamplingParams
    """Without the model's own end tokens, which the tokenizer adds unless `ignore_eos`."""
    text: TextOptions = TextOptions()
    num_choices: int = 1
    max_tokens: int | None = None
    """None: as many as the model's context has room for."""
    ignore_eos: bool = False
    priority: int = 0
    """Smaller goes first."""
    timeout_ms: int | None = None
    """From its arrival at the scheduler, the request has so much time in all; then it fails."""
    attempt: int = 1
    """Grows when the request is submitted again because the scheduler that had it is lost, or has lost it. A higher
    attempt replaces a lower one everywhere (`shared.attempts`). What is sent again because nobody answered is the same
    attempt."""
    resumed: tuple[ResumedChoice, ...] = ()
    """Of a later attempt: the output so far, of each choice. Empty: nothing yet."""
    owner: str = ""
    """A hash of the client's API key: only who has the same may resume the request. Empty: there are no keys."""
    client: bytes = b""
    """What gateways need to tell the answer again; only they look into it. Empty: the request cannot be resumed."""
    past: RequestPast | None = None
    """Of a later attempt, or one that had to wait: what came before."""
    trace: TraceContext | None = None
    """Where in a trace it belongs. None: nobody wants to follow it."""


class SubmitTokens(Message, frozen=True, tag="submit_tokens"):
    """Tokenizer → scheduler: generate from these tokens and answer to `gateway_id`."""

    request_id: RequestId
    gateway_id: InstanceId
    model: str
    tenant: str
    prompt_token_ids: Int32Array
    sampling: SamplingParams
    text: TextOptions
    num_choices: int
    max_tokens: int | None
    """None: as many as fit the model's context and the executor's cache."""
    priority: int = 0
    timeout_ms: int | None = None
    attempt: int = 1
    resumed: tuple[ResumedChoice, ...] = ()
    owner: str = ""
    client: bytes = b""
    past: RequestPast | None = None
    trace: TraceContext | None = None


class RequestAccepted(Message, frozen=True, tag="request_accepted"):
    """Scheduler → gateway: this request will end in exactly one `RequestClosed`."""

    request_id: RequestId
    scheduler_id: InstanceId
    num_prompt_tokens: int
    attempt: int = 1


class RequestRefused(Message, frozen=True, tag="request_refused"):
    """Tokenizer or scheduler → gateway: this attempt was never started, and why."""

    request_id: RequestId
    error: ErrorInfo
    attempt: int = 1


class CancelRequest(Message, frozen=True, tag="cancel_request"):
    """Gateway or detokenizer → scheduler: stop. Idempotent; may come before the request does, and may race its end."""

    request_id: RequestId
    gateway_id: InstanceId
    """Where the request's stream ends."""
    attempt: int = 1
    """The latest attempt that is to stop; a later one goes on."""
    goes_on: bool = False
    """Whether the request goes on elsewhere, in a later attempt: then this one is to be forgotten, without an end."""


class ReplayRequest(Message, frozen=True, tag="replay_request"):
    """Gateway → scheduler: say the output again if you have more of it than I, or its end.

    Answered by the output, by nothing if there is nothing new, by `RequestUnknown`, or by `RequestMoved`.
    """

    request_id: RequestId
    gateway_id: InstanceId
    attempt: int
    num_tokens: tuple[int, ...]
    """How many tokens of each choice the gateway has."""


class RequestUnknown(Message, frozen=True, tag="request_unknown"):
    """Scheduler → gateway: I have no such attempt, running or ended; submit the request again."""

    request_id: RequestId
    scheduler_id: InstanceId
    attempt: int


class RequestReleased(Message, frozen=True, tag="request_released"):
    """Scheduler → gateway: I have no executor for this attempt, and another scheduler has: submit it there.

    I keep what there is of it, and say so again, until you tell me that it goes on there, or is not wanted any more
    (`CancelRequest`).
    """

    request_id: RequestId
    scheduler_id: InstanceId
    attempt: int
    past: RequestPast


class RequestMoved(Message, frozen=True, tag="request_moved"):
    """Scheduler → gateway: the client follows this request at another gateway now; forget it."""

    request_id: RequestId
    scheduler_id: InstanceId
    attempt: int = 1
    """The one that it goes on as. Whoever has a later one has it from that gateway, and forgets nothing."""


class FindRequest(Message, frozen=True, tag="find_request"):
    """Gateway → all schedulers: who has this request of this owner, running or ended?

    Answered by `RequestFound`, or not at all. Changes nothing.
    """

    query_id: str
    request_id: RequestId
    owner: str
    gateway_id: InstanceId


class RequestFound(Message, frozen=True, tag="request_found"):
    """Scheduler → gateway: I have it, as this attempt. If its client still waits, adopt it (`AdoptRequest`)."""

    query_id: str
    request_id: RequestId
    scheduler_id: InstanceId
    attempt: int


class AdoptRequest(Message, frozen=True, tag="adopt_request"):
    """Gateway → scheduler: point this request to me, if it still is the attempt that you said.

    Answered by `RequestAdopted` and then by all of the output; by `RequestFound` if it is another attempt by now, since
    somebody else was faster; or not at all.
    """

    query_id: str
    request_id: RequestId
    owner: str
    gateway_id: InstanceId
    attempt: int = 1
    next_attempt: int = 2
    """The one that it goes on as (`shared.attempts`)."""


class RequestAdopted(Message, frozen=True, tag="request_adopted"):
    """Scheduler → gateway: the request is yours from now on."""

    query_id: str
    scheduler_id: InstanceId
    submission: SubmitTokens
    """Enough to submit it again elsewhere. Its `attempt` is what it goes on as, its `timeout_ms` is what is left, its
    `past` is until this moment, its `resumed` is empty."""
    num_output_tokens: tuple[int, ...]
    """How many tokens each choice has at this moment; all of them follow."""
    has_ended: bool
    """Whether it ended before: the end follows too."""


class TokenizePrompt(Message, frozen=True, tag="tokenize_prompt"):
    """Gateway → tokenizer: which tokens would the executor get for this prompt?"""

    call_id: str
    gateway_id: InstanceId
    model: str
    prompt: Prompt


class PromptTokenized(Message, frozen=True, tag="prompt_tokenized"):
    """Tokenizer → gateway: the answer to `TokenizePrompt`."""

    call_id: str
    token_ids: Int32Array
    max_model_len: int


class DetokenizeTokens(Message, frozen=True, tag="detokenize_tokens"):
    """Gateway → tokenizer: which text do these tokens spell?"""

    call_id: str
    gateway_id: InstanceId
    model: str
    token_ids: Int32Array


class TokensDetokenized(Message, frozen=True, tag="tokens_detokenized"):
    """Tokenizer → gateway: the answer to `DetokenizeTokens`."""

    call_id: str
    text: str


class CallFailed(Message, frozen=True, tag="call_failed"):
    """Tokenizer → gateway: the question with this call id has no answer, and why."""

    call_id: str
    error: ErrorInfo
