"""From a GGUF file's vocabulary to `tokenizer.json` and `tokenizer_config.json`.

Every token keeps its id. Control tokens become special tokens, user-defined ones ordinary added tokens; both are
matched whole in a text before anything else happens to it.
"""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from shared.errors import ModelError
from shared.models.gguf_import.pre_tokenizers import RULES
from shared.models.gguf_import.vocabulary import TokenKind, Vocabulary

_SPACE = "\u2581"
"""How SentencePiece writes a space inside a token."""


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer. Raises ModelError if its kind is not supported, or if its parts do not fit together."""
    match vocabulary.model:
        case "gpt2":
            tokenizer = _byte_level(vocabulary)
        case "llama":
            tokenizer = _sentence_piece(vocabulary)
        case other:
            raise ModelError(f"the tokenizer {other!r} (tokenizer.ggml.model) is not supported; gpt2 and llama are")
    tokenizer.add_special_tokens(_added(vocabulary, TokenKind.CONTROL, TokenKind.UNKNOWN))
    tokenizer.add_tokens(_added(vocabulary, TokenKind.USER_DEFINED))
    return tokenizer


def build_settings(vocabulary: Vocabulary, max_model_len: int) -> dict[str, Any]:
    """What `tokenizer_config.json` says of this tokenizer."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.token(vocabulary.bos_id),
        "eos_token": vocabulary.token(vocabulary.eos_id),
        "unk_token": vocabulary.token(vocabulary.unknown_id),
        "pad_token": vocabulary.token(vocabulary.padding_id),
        "add_bos_token": _adds_bos(vocabulary),
        "add_eos_token": vocabulary.adds_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
        "chat_template": vocabulary.chat_template,
    }
    return {key: value for key, value in settings.items() if value is not None}


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    rules = RULES.get(vocabulary.pre_tokenizer)
    if rules is None:
        raise ModelError(
            f"the way this vocabulary cuts text ({vocabulary.pre_tokenizer!r} in tokenizer.ggml.pre) is not supported; "
            f"supported are {', '.join(sorted(RULES))}"
        )
    if vocabulary.merges is None:
        raise ModelError("the vocabulary has no merges (tokenizer.ggml.merges)")
    tokenizer = _bpe(vocabulary, [_pair(merge) for merge in vocabulary.merges], {"ignore_merges": rules.ignores_merges})
    if rules.normalizes_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rules.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    to_bytes = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    frame = _frame(vocabulary)
    tokenizer.post_processor = to_bytes if frame is None else processors.Sequence([to_bytes, frame])
    return tokenizer


def _sentence_piece(vocabulary: Vocabulary) -> Tokenizer:
    if vocabulary.scores is None:
        raise ModelError("the vocabulary has no scores (tokenizer.ggml.scores)")
    options = {"unk_token": vocabulary.token(vocabulary.unknown_id), "fuse_unk": True, "byte_fallback": True}
    tokenizer = _bpe(vocabulary, _merges_by_score(vocabulary, vocabulary.scores), options)
    to_spaces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    to_pieces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if vocabulary.adds_space_prefix:
        to_pieces.insert(0, normalizers.Prepend(_SPACE))
        to_spaces.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(to_pieces)
    tokenizer.decoder = decoders.Sequence(to_spaces)
    if (frame := _frame(vocabulary)) is not None:
        tokenizer.post_processor = frame
    return tokenizer


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], options: dict[str, Any]) -> Tokenizer:
    ids: dict[str, int] = {}
    for token_id, token in enumerate(vocabulary.tokens):
        ids.setdefault(token, token_id)
    try:
        return Tokenizer(BPE(ids, merges, **options))
    except Exception as error:  # the library raises plain exceptions
        raise ModelError(f"the vocabulary's merges do not fit its tokens: {error}") from error


def _pair(merge: str) -> tuple[str, str]:
    """The two halves of a merge; a space as first character belongs to the left one."""
    cut = merge.find(" ", 1)
    if cut < 0:
        raise ModelError(f"the vocabulary has the merge {merge!r}, which is no pair")
    return merge[:cut], merge[cut + 1 :]


def _merges_by_score(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece's order as merges: it always makes the piece with the best score that two neighbours give.

    Only ordinary tokens take part, so that no text can be merged into a control token.
    """
    ids = {vocabulary.tokens[token_id]: token_id for token_id in vocabulary.ids_of(TokenKind.NORMAL)}
    merges = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((scores[token_id], len(left), left, right))
    merges.sort(key=lambda merge: merge[:2], reverse=True)
    return [(left, right) for _, _, left, right in merges]


def _frame(vocabulary: Vocabulary) -> processors.TemplateProcessing | None:
    """What puts BOS before a text and EOS after it, if anything does."""
    ends = []
    if _adds_bos(vocabulary):
        ends.append((vocabulary.token(vocabulary.bos_id), vocabulary.bos_id))
    first = [token for token, _ in ends]
    last = []
    if vocabulary.adds_eos and vocabulary.eos_id is not None:
        last = [vocabulary.token(vocabulary.eos_id)]
        ends.append((last[0], vocabulary.eos_id))
    if not ends:
        return None
    single = [*first, "$A", *last]
    pair = [*single, *first, "$B:1", *last]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(dict.fromkeys(ends)))


def _adds_bos(vocabulary: Vocabulary) -> bool:
    if vocabulary.bos_id is None:
        return False
    if vocabulary.adds_bos is not None:
        return vocabulary.adds_bos
    rules = RULES.get(vocabulary.pre_tokenizer)
    return vocabulary.model == "llama" or (rules is not None and rules.adds_bos)


def _added(vocabulary: Vocabulary, *kinds: TokenKind) -> list[AddedToken]:
    is_special = TokenKind.CONTROL in kinds
    ids = sorted(token_id for kind in kinds for token_id in vocabulary.ids_of(kind))
    return [AddedToken(vocabulary.tokens[token_id], normalized=False, special=is_special) for token_id in ids]
