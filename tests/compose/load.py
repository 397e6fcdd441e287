"""Clients of the published port that ask for short answers without a break, and without a second try.

Owns the asking and the judging of answers. Does not know what is done to the mesh meanwhile.
"""

import contextlib
import http.client
import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Final

from tests.answers import SameTexts, WrongAnswer, text_of

_NUM_CLIENTS: Final = 4
_NUM_PROMPTS: Final = 4
_TIMEOUT_S: Final = 60


class Load:
    """Some clients, each with a connection that it keeps; every second answer comes as a stream."""

    def __init__(self, port: int, model: str) -> None:
        self.failures: list[str] = []
        self.happening = "nothing"
        """What is done to the mesh at the moment, for the report."""
        self.num_answered = 0
        self.longest_s = 0.0
        self._port = port
        self._model = model
        self._numbers = itertools.count()
        self._texts = SameTexts()
        self._is_over = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Ask as long as the context lasts; all answers have come at its end."""
        clients = [threading.Thread(target=self._run, name=f"client {number}") for number in range(_NUM_CLIENTS)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            self._is_over.set()
            for client in clients:
                client.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        while not self._is_over.is_set():
            number, happening, begun = next(self._numbers), self.happening, time.monotonic()
            try:
                self._texts.check(number % _NUM_PROMPTS, self._ask(connection, number % _NUM_PROMPTS))
            except (OSError, http.client.HTTPException, ValueError, KeyError, WrongAnswer) as error:
                self.failures.append(f"from {happening} to {self.happening}: {type(error).__name__} {error}"[:300])
                connection.close()
            self.longest_s = max(self.longest_s, time.monotonic() - begun)
            self.num_answered += 1
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection, number: int) -> str:
        is_stream = number % 2 == 0
        body = {"model": self._model, "prompt": f"Herring {number} said: ", "max_tokens": 8, "temperature": 0}
        body |= {"ignore_eos": True, "stream": is_stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            return text_of(response.status, response.read().decode(), is_stream=is_stream)
