"""Which decoder a model needs. Does not own how any of them works."""

from pathlib import Path

from services.detokenizer.byte_level import ByteLevelDecoding, is_byte_level
from services.detokenizer.incremental import Decoding
from services.detokenizer.pieces import PieceDecoding, piece_rules
from services.detokenizer.vocabulary import load_vocabulary


def load_decoding(folder: Path) -> Decoding:
    """The decoding of the model in `folder`. Raises ModelError that names the file at fault."""
    vocabulary = load_vocabulary(folder)
    if is_byte_level(vocabulary):
        return ByteLevelDecoding(vocabulary)
    if (rules := piece_rules(vocabulary.steps)) is not None:
        return PieceDecoding(vocabulary, rules)
    from services.detokenizer.window import load_window_decoding  # needs the library, 15 MB that most models spare

    return load_window_decoding(vocabulary)
