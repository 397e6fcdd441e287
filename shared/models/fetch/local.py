"""A model folder or a GGUF file that is on this machine already."""

from pathlib import Path

from shared.errors import ModelError
from shared.models.fetch.result import Fetched, FetchedFile, FetchedFolder
from shared.models.fetch.selection import select


def find_local(path: Path) -> Fetched:
    """What is at `path`. Raises ModelError if it is neither a GGUF file nor a folder with a model."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a GGUF file; give a .gguf file or a model's folder")
        return FetchedFile(path)
    if not path.is_dir():
        hint = "; a file of a Hugging Face repository is written organisation/name:file.gguf"
        raise ModelError(f"{path} does not exist{hint if path.suffix == '.gguf' else ''}")
    selection = select([entry.name for entry in path.iterdir()], str(path))
    return FetchedFile(path / selection.files[0]) if selection.is_gguf else FetchedFolder(path, is_ours=False)
