"""One instance of every message class, with its bytes on the wire. The bytes are the protocol: they never change.

When a field is added at the end of a class, its old bytes move to the compatibility tests and new ones come here.
"""

from collections.abc import Iterator

import msgspec

import shared.messages as wire
from shared.ids import InstanceId, RequestId, Service
from shared.messages import (
    AdoptRequest,
    AttachExecutor,
    AttachRefused,
    CallFailed,
    CancelRequest,
    ChatMessage,
    ChatPrompt,
    ChoiceText,
    ChoiceTokens,
    DecodeTokens,
    DetachExecutor,
    DetokenizerStatus,
    DetokenizeTokens,
    ErrorInfo,
    ExecutorAttached,
    ExecutorCapacity,
    ExecutorStatus,
    ExecutorView,
    FindRequest,
    FinishReason,
    GatewayStatus,
    Message,
    Outcome,
    PinnedPrefix,
    PinsChanged,
    Presence,
    PromptTokenized,
    ReplayLog,
    ReplayRequest,
    RequestAccepted,
    RequestAdopted,
    RequestClosed,
    RequestFound,
    RequestMoved,
    RequestOpened,
    RequestPast,
    RequestRefused,
    RequestReleased,
    RequestUnknown,
    ResumedChoice,
    RowFailure,
    RunStep,
    SchedulerStatus,
    SlotAssignment,
    Span,
    SpanEvent,
    SpansFound,
    SpansWanted,
    StepCompleted,
    StepPlan,
    StepResult,
    StepsMissing,
    StepTaken,
    StopStringFound,
    SubmitRequest,
    SubmitTokens,
    TextAlternative,
    TextLogprobs,
    TextOptions,
    TextProduced,
    TextPrompt,
    Timing,
    TokenizePrompt,
    TokenizerStatus,
    TokenLogprobs,
    TokenPrompt,
    TokensDetokenized,
    TraceContext,
    Usage,
    UsageRecord,
    int32s,
)
from shared.sampling import SamplingParams

REQUEST = RequestId("req-00")
GATEWAY, TOKENIZER, SCHEDULER, EXECUTOR, DETOKENIZER = (InstanceId(f"{service}-1") for service in Service)

TRACE = TraceContext(bytes(range(1, 17)), bytes(range(17, 25)), True, "vendor=1")
EVENT = SpanEvent("resumed", 2**60 + 1, {"how": "socket"})
SPAN = Span(
    REQUEST,
    "decode",
    bytes(range(25, 33)),
    TRACE,
    2**60,
    2**60 + 5,
    {"text": "é", "is": True, "count": 2**40, "share": 0.5, "all": ("stop", "length")},
    (EVENT,),
    (TRACE,),
    True,
)
STEP = StepTaken(7, 2**60, 5_000_000, 3, 40, 7, 2)
SAMPLING = SamplingParams(
    seed=2**63 - 1,
    temperature=0.5,
    top_k=40,
    top_p=0.75,
    min_p=0.125,
    presence_penalty=-2.0,
    frequency_penalty=2.0,
    repetition_penalty=1.5,
    logit_bias={7: -100.0},
    min_tokens=3,
    end_token_ids=(2, 0),
    num_logprobs=5,
)
ERROR = ErrorInfo(429, "rate_limit_error", "queue_full", "too many", None, 1.5)
TEXT = TextOptions(("\n\n", "ß"), False, int32s([1, 2]))
CHAT = ChatPrompt((ChatMessage("user", "hé", "ann"),), {"enable_thinking": True, "depth": [1, None]}, True)
CAPACITY = ExecutorCapacity("tiny", 4096, 32, 64, 8192, 512, 7)
LOGPROBS = TokenLogprobs(-0.5, int32s([3, 4]), (-0.25, -1.0))
ASSIGNMENT = SlotAssignment(5, REQUEST, 1, int32s([1, -1, 2**31 - 1]), 2, SAMPLING, int32s([9]), TRACE)
PLAN = StepPlan(
    step_id=7,
    released=int32s([1]),
    assigned=(ASSIGNMENT,),
    copies=int32s([3, 4]),
    slots=int32s([5, 6]),
    starts=int32s([0, 10]),
    counts=int32s([3, 1]),
    num_new_blocks=int32s([1, 0]),
    new_block_ids=int32s([11]),
    sampled_rows=int32s([1]),
    max_drafts=int32s([3]),
)
RESULT = StepResult(
    7,
    int32s([42, 43, 0]),
    (LOGPROBS, None, None),
    (RowFailure(1, "NaN"),),
    0.125,
    num_tokens=int32s([2, 1]),
    num_drafted=int32s([3, 0]),
)
USAGE = Usage(10, 8, (3, 4))
CLOSED = RequestClosed(REQUEST, Outcome.FAILED, USAGE, Timing(0.5, 1.0, 2.0), ERROR, 2)
ALTERNATIVE = TextAlternative("é", -0.5, "é".encode(), 42)
CHOICE_TEXT = ChoiceText(
    REQUEST, 0, 4, int32s([42]), 9, "né", FinishReason.STOP, (TextLogprobs(ALTERNATIVE, (ALTERNATIVE,)),), 2
)
CHOICE_TOKENS = ChoiceTokens(REQUEST, 1, 4, int32s([42, 43]), FinishReason.LENGTH, (LOGPROBS, None))
OPENED = RequestOpened(REQUEST, SCHEDULER, GATEWAY, "tiny", TEXT, 2, 2, 3, TRACE)
VIEW = ExecutorView(EXECUTOR, "tiny", 3, 2, 4096, 4000, 100, 12, 34, 5.5)
SCHEDULER_STATUS = SchedulerStatus((VIEW,), 2, 3, 1000, 800, 500, 1, 5, 6, 7, 8)
RESUMED = ResumedChoice(int32s([42, 43]), FinishReason.LENGTH, (LOGPROBS, None))
PAST = RequestPast(2.0, 0.5, 1.0, 8)
SUBMISSION = SubmitTokens(
    REQUEST,
    GATEWAY,
    "tiny",
    "acme",
    int32s([1, 2, 3]),
    SAMPLING,
    TEXT,
    2,
    100,
    3,
    5000,
    2,
    (RESUMED, ResumedChoice()),
    "0a1b",
    b"chat",
    PAST,
    TRACE,
)

EXAMPLES: tuple[msgspec.Struct, ...] = (
    SAMPLING,
    ERROR,
    TEXT,
    CHAT,
    ChatMessage("user", "hé", "ann"),
    TextPrompt("once", False),
    TokenPrompt(int32s([1, 300])),
    CAPACITY,
    LOGPROBS,
    ASSIGNMENT,
    PLAN,
    RowFailure(1, "NaN"),
    RESULT,
    USAGE,
    Timing(0.5, 1.0, 2.0),
    CLOSED,
    ALTERNATIVE,
    TextLogprobs(ALTERNATIVE, (ALTERNATIVE,)),
    CHOICE_TEXT,
    CHOICE_TOKENS,
    OPENED,
    VIEW,
    RESUMED,
    PAST,
    SubmitRequest(
        REQUEST,
        GATEWAY,
        SCHEDULER,
        "tiny",
        "acme",
        CHAT,
        SAMPLING,
        TEXT,
        2,
        100,
        True,
        -2,
        5000,
        2,
        (RESUMED,),
        "0a1b",
        b"chat",
        PAST,
        TRACE,
    ),
    SUBMISSION,
    RequestAccepted(REQUEST, SCHEDULER, 3, 2),
    RequestRefused(REQUEST, ERROR, 2),
    CancelRequest(REQUEST, GATEWAY, 2, True),
    ReplayRequest(REQUEST, GATEWAY, 2, (7, 0)),
    RequestUnknown(REQUEST, SCHEDULER, 2),
    RequestReleased(REQUEST, SCHEDULER, 2, PAST),
    RequestMoved(REQUEST, SCHEDULER, 2**43),
    FindRequest("adopt-1", REQUEST, "0a1b", GATEWAY),
    RequestFound("adopt-1", REQUEST, SCHEDULER, 3),
    AdoptRequest("adopt-1", REQUEST, "0a1b", GATEWAY, 3, 2**43),
    RequestAdopted("adopt-1", SCHEDULER, SUBMISSION, (7, 0), True),
    TokenizePrompt("call-1", GATEWAY, "tiny", TextPrompt("once", False)),
    PromptTokenized("call-1", int32s([1, 2]), 8192),
    DetokenizeTokens("call-1", GATEWAY, "tiny", int32s([1, 2])),
    TokensDetokenized("call-1", "once"),
    CallFailed("call-1", ERROR),
    AttachExecutor(SCHEDULER),
    ExecutorAttached(EXECUTOR, 3, CAPACITY),
    AttachRefused(EXECUTOR, SCHEDULER),
    DetachExecutor(SCHEDULER, 3),
    RunStep(3, PLAN),
    StepCompleted(EXECUTOR, 3, RESULT),
    StepsMissing(EXECUTOR, 3, 8),
    DecodeTokens(SCHEDULER, (OPENED,), (CHOICE_TOKENS,), (CLOSED,)),
    ReplayLog(REQUEST, DETOKENIZER),
    StopStringFound(REQUEST, 1, 6),
    PinnedPrefix("tiny", "acme", int32s([1, 2, 3])),
    PinsChanged("system"),
    TRACE,
    EVENT,
    SPAN,
    STEP,
    SpansWanted("trace-1", GATEWAY, REQUEST),
    SpansFound("trace-1", SCHEDULER, "scheduler-1", "0a1b", (SPAN,), (STEP,), 3),
    UsageRecord(REQUEST, "acme", "tiny", Outcome.FAILED, USAGE, 1.5, GATEWAY, "stalled"),
    TextProduced(DETOKENIZER, (CHOICE_TEXT,), (CLOSED,)),
    GatewayStatus("http://127.0.0.1:8000", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
    TokenizerStatus(8192, 3, 1000),
    SCHEDULER_STATUS,
    ExecutorStatus(SCHEDULER, 3, "cpu", 70, 900, 1.5, 80, 60),
    DetokenizerStatus(4, 500, 3),
    Presence(
        Service.SCHEDULER,
        SCHEDULER,
        "scheduler-1",
        ("tiny",),
        SCHEDULER_STATUS,
        6,
        True,
        False,
        "http://127.0.0.1:9464",
        True,
    ),
)


def message_classes() -> Iterator[type[msgspec.Struct]]:
    """Every class that `shared.messages` defines, and the one it takes from `shared.sampling`."""
    for name in dir(wire):
        kind = getattr(wire, name)
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message:
            yield kind
    yield SamplingParams


def example_of(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """The example of exactly this class."""
    (example,) = (example for example in EXAMPLES if type(example) is kind)
    return example


def name_of(example: msgspec.Struct) -> str:
    """The class's name, for test ids."""
    return type(example).__name__
