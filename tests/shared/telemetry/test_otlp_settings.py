"""OpenTelemetry's variables: each means what its specification says, and what is wrong is named."""

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.telemetry.otlp_settings import OtlpSettings, otlp_settings

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}


def settings(**variables: str) -> OtlpSettings:
    found = otlp_settings(ENDPOINT | variables)
    assert found is not None
    return found


def test_an_endpoint_is_all_that_it_takes() -> None:
    assert settings() == OtlpSettings("http://collector:4318/v1/traces")


def test_an_endpoint_for_traces_is_used_as_it_is() -> None:
    found = settings(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="https://elsewhere/some/path")
    assert found.endpoint == "https://elsewhere/some/path"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
        ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"},
        ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_exported_without_an_endpoint_or_where_that_is_switched_off(environ: dict[str, str]) -> None:
    assert otlp_settings(environ) is None


def test_headers_are_pairs_whose_values_are_percent_encoded() -> None:
    found = settings(OTEL_EXPORTER_OTLP_HEADERS=" api-key = a%20b,, authorization=Basic Zm9v=")
    assert found.headers == {"api-key": "a b", "authorization": "Basic Zm9v="}


def test_what_is_set_for_traces_outweighs_what_is_set_for_everything() -> None:
    found = settings(
        OTEL_EXPORTER_OTLP_HEADERS="a=1",
        OTEL_EXPORTER_OTLP_TRACES_HEADERS="b=2",
        OTEL_EXPORTER_OTLP_TIMEOUT="1000",
        OTEL_EXPORTER_OTLP_TRACES_TIMEOUT="2500",
        OTEL_EXPORTER_OTLP_COMPRESSION="none",
        OTEL_EXPORTER_OTLP_TRACES_COMPRESSION="gzip",
        OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
        OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf",
    )
    assert (found.headers, found.timeout_s, found.has_gzip) == ({"b": "2"}, 2.5, True)


def test_a_process_is_what_its_environment_says() -> None:
    found = settings(OTEL_RESOURCE_ATTRIBUTES="service.name=ignored,zone=a%2Cb", OTEL_SERVICE_NAME="llm")
    assert found.resource == {"service.name": "llm", "zone": "a,b"}


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "'collector:4318': must be an address"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://", "'http://': must be an address"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:port", "'http://a:port': Port could not be cast"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "'grpc': spans are exported as http/protobuf only"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "-1", "'-1': must be a number of milliseconds above 0"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "'soon': could not convert"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "'zip': must be gzip or none"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "secret", "(hidden): must be key=value pairs"),
        ("OTEL_RESOURCE_ATTRIBUTES", "zone", "'zone': must be key=value pairs"),
    ],
)
def test_what_is_wrong_is_the_operators_to_mend(name: str, value: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        otlp_settings(ENDPOINT | {name: value})
    assert str(caught.value).startswith(f"{name}={complaint}")


def test_a_password_in_an_endpoint_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        otlp_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://me:secret@collector"})
    assert "secret" not in str(caught.value)


def test_certificates_are_read_at_start(tmp_path: Path) -> None:
    for name in ("CERTIFICATE", "TRACES_CLIENT_CERTIFICATE"):
        with pytest.raises(ConfigError) as caught:
            settings(**{f"OTEL_EXPORTER_OTLP_{name}": str(tmp_path / "absent.pem")})
        assert "CERTIFICATE" in str(caught.value)
