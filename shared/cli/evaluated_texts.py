"""The texts that `shoal evaluate` compares on, as a model reads them.

Owns reading and tokenizing. Does not own windows, nor what is measured.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from shared.errors import ModelError, OperatorError
from shared.evaluation import TokenizedText
from shared.models.config import load_config

STDIN: Final = "-"
_MAX_TOKEN_CHARS: Final = 64
"""Of a text that is bounded, so many characters for each token are encoded; hardly any token spells as many."""


class TextReader:
    """Reads texts for the model in a folder. Control tokens that a text spells are read as such."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError that names the file at fault."""
        self._path = folder / "tokenizer.json"
        self._vocab_size = load_config(folder).vocab_size
        try:
            self._tokenizer = Tokenizer.from_file(str(self._path))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{self._path} is not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.bos_token_id: Final = self._find_bos(folder / "tokenizer_config.json")
        """What every prompt of this model begins with, if anything."""

    def read(self, path: str, *, max_tokens: int | None = None) -> TokenizedText:
        """The first tokens of a file, or of standard input, without the BOS token.

        Raises OperatorError if it cannot be read or has no token that could be predicted.
        """
        name = "standard input" if path == STDIN else path
        text = _read_text(path, name)
        if max_tokens is not None:
            text = text[: _MAX_TOKEN_CHARS * max_tokens]
        token_ids = self._tokenizer.encode(text, add_special_tokens=False).ids[:max_tokens]
        if len(token_ids) < (2 if self.bos_token_id is None else 1):
            raise OperatorError(f"{name} is too short: nothing in it could be predicted")
        if max(token_ids) >= self._vocab_size:
            raise ModelError(f"{self._path} has tokens beyond the {self._vocab_size} of the model's vocabulary")
        return TokenizedText(name, tuple(token_ids))

    def _find_bos(self, path: Path) -> int | None:
        """By the rule of the tokenizer service: `add_bos_token`, else what the tokenizer puts before an empty text."""
        settings = _read_settings(path)
        wanted = settings.get("add_bos_token")
        bos, eos = (self._id_of(settings.get(role)) for role in ("bos_token", "eos_token"))
        leading = next(iter(self._tokenizer.encode("", add_special_tokens=True).ids), None)
        if wanted is not None:
            return (leading if bos is None else bos) if wanted else None
        return None if leading == eos and leading != bos else leading

    def _id_of(self, named: Any) -> int | None:
        """Tokens are named by their text, or by an object with their `content`."""
        text = named.get("content") if isinstance(named, dict) else named
        found: int | None = self._tokenizer.token_to_id(text) if isinstance(text, str) else None
        return found


def _read_text(path: str, name: str) -> str:
    try:
        content = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise OperatorError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OperatorError(f"{name} is not UTF-8 text (byte {error.start} is none of it)") from None


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not an object")
    return content
