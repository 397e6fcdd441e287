"""The part of Hugging Face's protocol that a pull uses, on the tests' web server."""

import hashlib
import json
from collections import deque

from tests.models.file_server import FileServer

COMMIT = "c0ffee" * 6 + "c0ff"


class FakeHub:
    """Repositories on a FileServer. Large files have SHA-256 checksums, small ones git's; `main` is at COMMIT."""

    def __init__(self, server: FileServer) -> None:
        self._server = server
        self.endpoint = server.url

    def add(
        self, repository: str, files: dict[str, bytes], *, license_name: str | None = None, listed: str | None = None
    ) -> None:
        """Put a repository there. `listed` is one more name in the listing that has no file."""
        siblings = [self._sibling(name, content) for name, content in files.items()]
        if listed is not None:
            siblings.append(self._sibling(listed, b""))
        info = {
            "_id": "1",
            "id": repository,
            "sha": COMMIT,
            "siblings": siblings,
            "cardData": {"license": license_name} if license_name else None,
        }
        for route in (f"api/models/{repository}", f"api/models/{repository}/revision/main"):
            self._server.files[route] = json.dumps(info).encode()
        for name, content in files.items():
            self._server.files[self.path(repository, name)] = content

    def path(self, repository: str, name: str) -> str:
        """Where a file is on the server."""
        return f"{repository}/resolve/{COMMIT}/{name}"

    def refuse(self, repository: str, revision: str, status: int, code: str) -> None:
        """Answer questions about a revision with a status and Hugging Face's code for the reason."""
        route = f"api/models/{repository}/revision/{revision}"
        self._server.statuses[route] = deque([status] * 10)
        self._server.fault_headers[route] = {"X-Error-Code": code} if code else {}

    @staticmethod
    def _sibling(name: str, content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()
        sibling: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob}
        if name.endswith((".safetensors", ".gguf")):
            sibling |= {"blobId": "0" * 40, "lfs": {"sha256": digest, "size": len(content), "pointerSize": 134}}
        return sibling
