"""The only types that travel between services, one module a conversation, and what each service listens to."""

from shared.messages.base import FinishReason, Int32Array, Message, int32s
from shared.messages.delivery import (
    ChoiceText,
    ChoiceTokens,
    DecodeTokens,
    Outcome,
    ReplayLog,
    RequestClosed,
    RequestOpened,
    StopStringFound,
    TextAlternative,
    TextLogprobs,
    TextProduced,
    Timing,
    Usage,
)
from shared.messages.pins import PINS_BUCKET, PinnedPrefix, PinsChanged
from shared.messages.presence import (
    DetokenizerStatus,
    ExecutorStatus,
    ExecutorView,
    GatewayStatus,
    Presence,
    SchedulerStatus,
    Status,
    TokenizerStatus,
)
from shared.messages.requests import (
    AdoptRequest,
    CallFailed,
    CancelRequest,
    ChatMessage,
    ChatPrompt,
    DetokenizeTokens,
    ErrorInfo,
    FindRequest,
    Prompt,
    PromptTokenized,
    ReplayRequest,
    RequestAccepted,
    RequestAdopted,
    RequestFound,
    RequestMoved,
    RequestPast,
    RequestRefused,
    RequestReleased,
    RequestUnknown,
    ResumedChoice,
    SubmitRequest,
    SubmitTokens,
    TextOptions,
    TextPrompt,
    TokenizePrompt,
    TokenPrompt,
    TokensDetokenized,
)
from shared.messages.steps import (
    CONTINUES,
    AttachExecutor,
    AttachRefused,
    DetachExecutor,
    ExecutorAttached,
    ExecutorCapacity,
    RowFailure,
    RunStep,
    SlotAssignment,
    StepCompleted,
    StepPlan,
    StepResult,
    StepsMissing,
    TokenLogprobs,
)
from shared.messages.traces import (
    Attributes,
    AttributeValue,
    Span,
    SpanEvent,
    SpansFound,
    SpansWanted,
    StepTaken,
    TraceContext,
)
from shared.messages.usage import USAGE_LEDGER, UsageRecord

GatewayInbound = (
    RequestAccepted
    | RequestRefused
    | RequestUnknown
    | RequestReleased
    | RequestMoved
    | RequestFound
    | RequestAdopted
    | TextProduced
    | PromptTokenized
    | TokensDetokenized
    | CallFailed
    | Presence
)
TokenizerInbound = SubmitRequest | TokenizePrompt | DetokenizeTokens
SchedulerInbound = (
    SubmitTokens
    | CancelRequest
    | ReplayRequest
    | FindRequest
    | AdoptRequest
    | ReplayLog
    | StopStringFound
    | ExecutorAttached
    | AttachRefused
    | StepCompleted
    | StepsMissing
    | PinsChanged
    | Presence
)
ExecutorInbound = AttachExecutor | DetachExecutor | RunStep | Presence
DetokenizerInbound = DecodeTokens | Presence

__all__ = [
    "CONTINUES",
    "PINS_BUCKET",
    "USAGE_LEDGER",
    "AdoptRequest",
    "AttachExecutor",
    "AttachRefused",
    "AttributeValue",
    "Attributes",
    "CallFailed",
    "CancelRequest",
    "ChatMessage",
    "ChatPrompt",
    "ChoiceText",
    "ChoiceTokens",
    "DecodeTokens",
    "DetachExecutor",
    "DetokenizeTokens",
    "DetokenizerInbound",
    "DetokenizerStatus",
    "ErrorInfo",
    "ExecutorAttached",
    "ExecutorCapacity",
    "ExecutorInbound",
    "ExecutorStatus",
    "ExecutorView",
    "FindRequest",
    "FinishReason",
    "GatewayInbound",
    "GatewayStatus",
    "Int32Array",
    "Message",
    "Outcome",
    "PinnedPrefix",
    "PinsChanged",
    "Presence",
    "Prompt",
    "PromptTokenized",
    "ReplayLog",
    "ReplayRequest",
    "RequestAccepted",
    "RequestAdopted",
    "RequestClosed",
    "RequestFound",
    "RequestMoved",
    "RequestOpened",
    "RequestPast",
    "RequestRefused",
    "RequestReleased",
    "RequestUnknown",
    "ResumedChoice",
    "RowFailure",
    "RunStep",
    "SchedulerInbound",
    "SchedulerStatus",
    "SlotAssignment",
    "Span",
    "SpanEvent",
    "SpansFound",
    "SpansWanted",
    "Status",
    "StepCompleted",
    "StepPlan",
    "StepResult",
    "StepTaken",
    "StepsMissing",
    "StopStringFound",
    "SubmitRequest",
    "SubmitTokens",
    "TextAlternative",
    "TextLogprobs",
    "TextOptions",
    "TextProduced",
    "TextPrompt",
    "Timing",
    "TokenLogprobs",
    "TokenPrompt",
    "TokenizePrompt",
    "TokenizerInbound",
    "TokenizerStatus",
    "TokensDetokenized",
    "TraceContext",
    "Usage",
    "UsageRecord",
    "int32s",
]
