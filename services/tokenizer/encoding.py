"""Prompts to tokens and back: exactly the tokens that the executor gets, whoever asks.

Owns the tokenizer of one model. Does not own limits on length, nor what happens with the tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, assert_never

from tokenizers import Tokenizer

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.control_tokens import ControlTokens
from services.tokenizer.model_files import read_model_files
from services.tokenizer.tokenizer_facts import bos_token_id, control_texts, end_token_ids, is_positional
from shared.errors import InvalidRequest, ModelError, PromptTooLong, RequestError
from shared.messages import ChatMessage, ChatPrompt, Int32Array, Prompt, TextPrompt, TokenPrompt, int32s
from shared.models.config import load_config

_DENSE_CHARS_PER_TOKEN: Final = 8
"""If a prompt fits only when each of its tokens spells more than this, its tokens are first counted in parts: most
such prompts do not fit, and encoding them whole would take 350 bytes of memory for each character."""
_PART_CHARS: Final = 65_536


def param_of(prompt: Prompt) -> str:
    """The field of a client's request that a prompt comes from."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def load_encoder(folder: Path, *, max_model_len: int | None = None) -> "PromptEncoder":
    """The encoder of the model in `folder`; `max_model_len` may lower the model's own limit, in tokens.

    Raises ModelError that names the file at fault.
    """
    files, config = read_model_files(folder), load_config(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path} is missing: this is not a model folder")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    template = None
    if files.chat_template is not None:
        template = ChatTemplate(files.chat_template, files.special_tokens, path=files.chat_template_path)
    return PromptEncoder(
        tokenizer,
        template,
        vocab_size=config.vocab_size,
        max_model_len=min(config.max_model_len, max_model_len or config.max_model_len),
        end_token_ids=end_token_ids(tokenizer, files, config),
        bos_token_id=bos_token_id(tokenizer, files),
    )


class PromptEncoder:
    """Encodes and decodes for one model. Its methods may be called from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        vocab_size: int,
        max_model_len: int,
        end_token_ids: tuple[int, ...],
        bos_token_id: int | None,
    ) -> None:
        """`bos_token_id` is what every prompt begins with, if anything. `max_model_len` counts prompt and output."""
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.end_token_ids = end_token_ids
        self.decoder_is_positional = is_positional(tokenizer)
        """Whether the text of an output's first token depends on the prompt's last."""
        self._tokenizer = tokenizer
        self._template = template
        self._bos_token_id = bos_token_id
        self._control_tokens = ControlTokens(tokenizer, control_texts(tokenizer, template))
        self._max_token_bytes = 4 * max(map(len, tokenizer.get_vocab()), default=0)

    def encode(self, prompt: Prompt) -> Int32Array:
        """The prompt's tokens, with exactly one BOS token if the model wants one; token ids are left as they are.

        Raises InvalidRequest, which names the field at fault, for a prompt that has no tokens or cannot be encoded,
        and PromptTooLong for one that is longer than the model's context by far. Other limits are the caller's.
        """
        match prompt:
            case ChatPrompt():
                token_ids = self._with_one_bos(self._encode_chat(prompt))
            case TextPrompt():
                encode = self._encode_freely if prompt.parse_special_tokens else self._control_tokens.encode_text
                token_ids = self._with_one_bos(self._encode(prompt.text, encode, "prompt"))
            case TokenPrompt():
                token_ids = prompt.token_ids
            case _:
                assert_never(prompt)
        if not token_ids:
            raise InvalidRequest("the prompt has no tokens", param=param_of(prompt))
        self.check_token_ids(token_ids, param=param_of(prompt))
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens spell, control tokens included. Raises InvalidRequest for unknown ones."""
        self.check_token_ids(token_ids, param="tokens")
        with _refusing("the tokens cannot be decoded", "tokens"):
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def check_token_ids(self, token_ids: Sequence[int], *, param: str) -> None:
        """Raises InvalidRequest that names `param` if one of them is not in the model's vocabulary."""
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
            outside = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise InvalidRequest(
                f"token {outside} is not among the {self.vocab_size} tokens of this model's vocabulary", param=param
            )

    def _encode_chat(self, prompt: ChatPrompt) -> list[int]:
        if self._template is None:
            raise InvalidRequest("this model has no chat template, so it takes no messages", param="messages")
        messages, arguments = [self._as_dict(message) for message in prompt.messages], prompt.template_arguments
        encode: Callable[[str], list[int]] = self._encode_freely
        if not prompt.parse_special_tokens and self._control_tokens.occur_in((messages, arguments)):
            disguise = self._control_tokens.disguise((messages, arguments))
            messages = disguise.hide(messages)
            arguments = {name: disguise.hide(value) for name, value in arguments.items()}
            encode = partial(self._control_tokens.encode_rendered, disguise=disguise)
        return self._encode(self._template.render(messages, arguments), encode, "messages")

    def _as_dict(self, message: ChatMessage) -> dict[str, str]:
        """A message as templates know it. OpenAI's `developer` is what most models call `system`."""
        assert self._template is not None
        is_unknown = message.role == "developer" and not self._template.knows_developers
        fields = {"role": "system" if is_unknown else message.role, "content": message.content}
        return fields if message.name is None else fields | {"name": message.name}

    def _encode(self, text: str, encode: Callable[[str], list[int]], param: str) -> list[int]:
        with _refusing("the prompt cannot be encoded", param):
            if len(text) > _DENSE_CHARS_PER_TOKEN * self.max_model_len:
                self._check_count(text, encode, param)
            return encode(text)

    def _check_count(self, text: str, encode: Callable[[str], list[int]], param: str) -> None:
        starts = range(0, len(text), _PART_CHARS)
        num_tokens = sum(len(encode(text[start : start + _PART_CHARS])) for start in starts)
        if num_tokens - self._max_token_bytes * len(starts) >= self.max_model_len:  # a token that was cut is its bytes
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens, but this model's context has room for {self.max_model_len}, "
                "of which at least one is for the output",
                param=param,
            )

    def _encode_freely(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _with_one_bos(self, token_ids: list[int]) -> Int32Array:
        if self._bos_token_id is None:
            return int32s(token_ids)
        num_written = next((n for n, i in enumerate(token_ids) if i != self._bos_token_id), len(token_ids))
        return int32s([self._bos_token_id, *token_ids[num_written:]])


@contextmanager
def _refusing(what: str, param: str) -> Iterator[None]:
    """Turns a fault of the library, which raises bare Exceptions and panics that are not even those, into a refusal."""
    try:
        yield
    except RequestError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InvalidRequest(f"{what}: {error}", param=param) from error
