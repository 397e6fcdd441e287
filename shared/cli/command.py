"""The entry of the `shoal` command: says in plain words which extra is missing, instead of a traceback."""

import sys
from typing import Final, NoReturn

_EXTRA_OF: Final = {
    "click": "cli",
    "rich": "cli",
    "psutil": "cli",
    "aiohttp": "cli",
    "obstore": "store",
    "huggingface_hub": "store",
    "gguf": "store",
    "safetensors": "store",
    "tokenizers": "store",
    "numpy": "store",
}


def run() -> NoReturn:
    """Run the command line that this process was given."""
    try:
        from shared.cli.main import main

        main()
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _EXTRA_OF:
            raise
        extra = _EXTRA_OF[library]
        sys.exit(f"shoal: this command needs {library}, which is not installed: pip install 'shoal[{extra}]'")
