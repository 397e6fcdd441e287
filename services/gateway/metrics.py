"""The gateway's metrics. Owns what is counted only for them; the rest is read where it is kept anyway."""

from collections.abc import Sequence
from typing import Final

from services.gateway.accounts import Account
from services.gateway.open_request import OpenRequest
from shared.telemetry.metrics import OTHER, Histogram, Names, Tally

_PROVIDER: Final = "shoal"
_MAX_TENANTS: Final = 100
"""The first so many tenants have numbers of their own; the others are counted together."""

_OF_REQUEST: Final = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
_DURATIONS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKENS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
_HTTP: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE"})


class GatewayMetrics:
    """Told of what happens to requests, each once."""

    def __init__(self) -> None:
        self.opened = Tally()
        self.ended = Tally()
        """By operation, ending and code."""
        self.tenant_requests = Tally()
        self.tenant_tokens = Tally()
        self.resumed = Tally()
        self._tenants = Names(_MAX_TENANTS)
        self._duration = Histogram(
            "gen_ai.server.request.duration",
            "s",
            "From admission to the end of a request",
            _DURATIONS,
            (*_OF_REQUEST, "error.type"),
        )
        self._first_token = Histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "From admission to the first output token of a request",
            _FIRST_TOKENS,
            _OF_REQUEST,
        )
        self._per_token = Histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time for each output token after the first",
            _PER_TOKEN,
            _OF_REQUEST,
        )
        self._tokens = Histogram(
            "shoal.gateway.request.tokens", "{token}", "Tokens of a request", _TOKENS, ("model", "type")
        )
        self._http = Histogram(
            "http.server.request.duration",
            "s",
            "From a request over HTTP to the last byte of its answer",
            _HTTP,
            ("http.request.method", "http.route", "http.response.status_code"),
        )

    @property
    def histograms(self) -> Sequence[Histogram]:
        """All of them."""
        return self._duration, self._first_token, self._per_token, self._tokens, self._http

    def request_opened(self, operation: str) -> None:
        """A request was admitted."""
        self.opened.add(1, operation)

    def request_refused(self, operation: str, code: str) -> None:
        """A client was refused a request that was never opened."""
        self.ended.add(1, operation, "refused", code)

    def first_token(self, request: OpenRequest, operation: str, now: float) -> None:
        """A request has its first output token, unless it had some before this gateway took it over."""
        if not any(request.num_tokens_at_adoption):
            self._first_token.record(now - request.opened_at, operation, _PROVIDER, request.spec.model)

    def request_ended(self, account: Account) -> None:
        """A request that was opened has ended."""
        labels = account.operation, _PROVIDER, account.model
        self._duration.record(account.duration_s, *labels, _error_type(account))
        if account.per_token_s is not None:
            self._per_token.record(account.per_token_s, *labels)
        self.ended.add(1, account.operation, account.ending, account.code)
        tenant = self._tenants.of(account.tenant)
        self.tenant_requests.add(1, tenant, account.ending)
        if (usage := account.usage) is not None:
            num_output_tokens = sum(usage.num_output_tokens)
            self._tokens.record(usage.num_prompt_tokens, account.model, "input")
            self._tokens.record(num_output_tokens, account.model, "output")
            self.tenant_tokens.add(usage.num_prompt_tokens, tenant, "input")
            self.tenant_tokens.add(usage.num_cached_tokens, tenant, "cached")
            self.tenant_tokens.add(num_output_tokens, tenant, "output")

    def request_resumed(self, *, is_here: bool) -> None:
        """A client came back for a request, and it was found."""
        self.resumed.add(1, "here" if is_here else "elsewhere")

    def answered(self, method: str, route: str, status: str, duration_s: float) -> None:
        """A request over HTTP was answered; `status` is empty if the client left."""
        self._http.record(duration_s, method if method in _METHODS else OTHER, route, status)


def _error_type(account: Account) -> str:
    if account.ending == "completed":
        return ""
    return account.code or account.ending
