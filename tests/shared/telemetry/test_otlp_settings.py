"""OpenTelemetry's variables: each means what its specification says, and what is wrong is named."""

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.telemetry.otlp_settings import OtlpSettings, Signal, interval_s, otlp_settings
from shared.telemetry.resource import said_of_resource

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}


def settings(**variables: str) -> OtlpSettings:
    found = otlp_settings(ENDPOINT | variables, Signal.TRACES)
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
    assert otlp_settings(environ, Signal.TRACES) is None


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({}, None),
        (ENDPOINT, "http://collector:4318/v1/metrics"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318"}, None),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:4318/x"}, "http://127.0.0.1:4318/x"),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, "http://collector:4318/v1/metrics"),
        (ENDPOINT | {"OTEL_METRICS_EXPORTER": "none"}, None),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
    ],
)
def test_metrics_have_the_same_variables_under_their_own_name(environ: dict[str, str], endpoint: str | None) -> None:
    found = otlp_settings(environ, Signal.METRICS)
    assert (found.endpoint if found is not None else None) == endpoint


def test_how_often_metrics_are_sent_is_in_milliseconds() -> None:
    assert interval_s({}) == interval_s({"OTEL_METRIC_EXPORT_INTERVAL": ""}) == 60.0
    assert interval_s({"OTEL_METRIC_EXPORT_INTERVAL": "500"}) == 0.5
    for wrong in ("often", "-1", "0", "nan", "inf"):
        with pytest.raises(ConfigError, match=f"OTEL_METRIC_EXPORT_INTERVAL='{wrong}': "):
            interval_s({"OTEL_METRIC_EXPORT_INTERVAL": wrong})


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
    said = {"OTEL_RESOURCE_ATTRIBUTES": "service.name=ignored,zone=a%2Cb", "OTEL_SERVICE_NAME": "llm"}
    assert said_of_resource(said) == {"service.name": "llm", "zone": "a,b"}
    with pytest.raises(ConfigError, match="OTEL_RESOURCE_ATTRIBUTES='zone': must be key=value pairs"):
        said_of_resource({"OTEL_RESOURCE_ATTRIBUTES": "zone"})


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "'collector:4318': must be an address"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://", "'http://': must be an address"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:port", "'http://a:port': Port could not be cast"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "'grpc': only http/protobuf is spoken"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "-1", "'-1': must be a number of milliseconds above 0"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "'soon': could not convert"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "'zip': must be gzip or none"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "secret", "(hidden): must be key=value pairs"),
    ],
)
def test_what_is_wrong_is_the_operators_to_mend(name: str, value: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        otlp_settings(ENDPOINT | {name: value}, Signal.TRACES)
    assert str(caught.value).startswith(f"{name}={complaint}")


def test_a_password_in_an_endpoint_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        otlp_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://me:secret@collector"}, Signal.TRACES)
    assert "secret" not in str(caught.value)


def test_certificates_are_read_at_start(tmp_path: Path) -> None:
    for name in ("CERTIFICATE", "TRACES_CLIENT_CERTIFICATE"):
        with pytest.raises(ConfigError) as caught:
            settings(**{f"OTEL_EXPORTER_OTLP_{name}": str(tmp_path / "absent.pem")})
        assert "CERTIFICATE" in str(caught.value)
