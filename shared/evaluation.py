"""What `shoal evaluate` asks of the executor's code, and what that answers: JSON between two processes."""

import msgspec


class TokenizedText(msgspec.Struct, frozen=True):
    """A text as the model reads it, without the token that every prompt begins with."""

    name: str
    token_ids: tuple[int, ...]


class EvaluationOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The formats to compare with float32, and the texts to compare them on."""

    model: str
    folder: str
    dtypes: tuple[str, ...]
    """As in `SHOAL_EXECUTOR_DTYPE`; none: what an executor with this environment computes in."""
    kv_dtype: str | None
    """As in `SHOAL_EXECUTOR_KV_DTYPE`; None: the environment's."""
    context: int
    """Tokens in a window at most; the model has room for so many."""
    bos_token_id: int | None
    """What every window begins with, if anything."""
    texts: tuple[TokenizedText, ...]


class FormatScore(msgspec.Struct, frozen=True, kw_only=True):
    """One format on one text; `services.executor.evaluate.scoring` defines the measures."""

    dtype: str
    """What was asked for, such as `auto`."""
    weights: str
    kv_cache: str
    nll: float
    perplexity: float
    delta_nll: float
    delta_nll_error: float
    mean_kl: float
    top1_agreement: float


class TextScore(msgspec.Struct, frozen=True, kw_only=True):
    """One text: float32's own figures, and each format's."""

    text: str
    num_tokens: int
    """Tokens that were predicted."""
    nll: float
    perplexity: float
    formats: tuple[FormatScore, ...]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison with float32: text by text, and over all tokens of all texts."""

    model: str
    context: int
    texts: tuple[TextScore, ...]
    total: TextScore
