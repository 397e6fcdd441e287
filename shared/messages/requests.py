"""Submission: gateway → tokenizer → scheduler, and what comes back to the gateway when a request is taken or refused.

Also the two questions a gateway asks a tokenizer on behalf of `/tokenize` and `/detokenize`.
Submission is idempotent by request id, so a sender that hears nothing sends again.
"""

from typing import Any

from shared.errors import RequestError
from shared.ids import InstanceId, RequestId
from shared.messages.base import Int32Array, Message, int32s
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


class RequestAccepted(Message, frozen=True, tag="request_accepted"):
    """Scheduler → gateway: this request will end in exactly one `RequestClosed`."""

    request_id: RequestId
    scheduler_id: InstanceId
    num_prompt_tokens: int


class RequestRefused(Message, frozen=True, tag="request_refused"):
    """Tokenizer or scheduler → gateway: this request was never started, and why."""

    request_id: RequestId
    error: ErrorInfo


class CancelRequest(Message, frozen=True, tag="cancel_request"):
    """Gateway or detokenizer → scheduler: stop. Idempotent; may come before the request does, and may race its end."""

    request_id: RequestId
    gateway_id: InstanceId
    """Where the request's stream ends."""


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
