"""The grammar of `shoal pull`."""

from pathlib import Path

import pytest

from shared.errors import ModelError
from shared.models.sources import (
    ALIASES,
    BucketSource,
    HubSource,
    LocalSource,
    PackageSource,
    Source,
    WebSource,
    parse_source,
)

_DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("text", "source", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", HubSource("Qwen/Qwen2.5-0.5B"), "Qwen/Qwen2.5-0.5B"),
        ("a/b@v1.0", HubSource("a/b", "v1.0"), "a/b"),
        ("a/b@refs/pr/1", HubSource("a/b", "refs/pr/1"), "a/b"),
        ("a/b:c-Q4_K_M.gguf", HubSource("a/b", None, "c-Q4_K_M.gguf"), "c-Q4_K_M"),
        ("a/b@main:q4/c.gguf", HubSource("a/b", "main", "q4/c.gguf"), "c"),
        ("/models/llama", LocalSource(Path("/models/llama")), "llama"),
        ("/models/x.gguf", LocalSource(Path("/models/x.gguf")), "x"),
        ("pypi:pkg", PackageSource("pkg"), "pkg"),
        ("pypi:pkg==1.2#f.gguf", PackageSource("pkg==1.2", "f.gguf"), "f"),
        (f"pypi:pkg#f.gguf&sha256={_DIGEST}", PackageSource("pkg", "f.gguf", _DIGEST), "f"),
        ("s3://bucket/models/llama/", BucketSource("s3://bucket/models/llama"), "llama"),
        ("gs://bucket", BucketSource("gs://bucket"), "bucket"),
        (f"az://box/x.gguf#sha256={_DIGEST}", BucketSource("az://box/x.gguf", _DIGEST), "x"),
        ("https://host/a/llama.tar.gz", WebSource("https://host/a/llama.tar.gz"), "llama"),
        ("https://host/a%20b.gguf?x=1", WebSource("https://host/a%20b.gguf?x=1"), "a-b"),
        (f"http://host/x.gguf#sha256={_DIGEST.upper()}", WebSource("http://host/x.gguf", _DIGEST), "x"),
        ("https://host/", WebSource("https://host/"), "host"),
    ],
)
def test_a_source_is_read_and_names_the_model(text: str, source: Source, name: str) -> None:
    order = parse_source(text)
    assert order.source == source
    assert order.name == name


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "is not a source"),
        ("", "is not a source"),
        ("a/b/c", "is not a source"),
        ("a/b:c.bin", "not the name of a GGUF file"),
        ("a/b:../c.gguf", "not the name of a GGUF file"),
        ("pypi:", "is not a package"),
        ("pypi:--index-url=x", "is not a package"),
        ("pypi:pkg>=1", "is not a package"),
        ("pypi:pkg#f.bin", "not the name of a GGUF file"),
        ("ftp://host/x.gguf", "scheme ftp://"),
        ("s3:///x", "names no bucket"),
        ("https:///x", "names no host"),
        ("https://host/x.gguf#sha256=abc", "64 hexadecimal digits"),
        ("https://host/x.gguf#y.gguf", "only sha256"),
    ],
)
def test_what_is_no_source_is_refused_in_words(text: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        parse_source(text)


def test_a_given_name_wins() -> None:
    assert parse_source("a/b", "mine").name == "mine"


def test_a_bad_name_is_refused_before_anything_else() -> None:
    with pytest.raises(ModelError, match="cannot name a model"):
        parse_source("a/b", "../evil")


def test_relative_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("./x", "x.gguf", "."):
        source = parse_source(text).source
        assert isinstance(source, LocalSource)
        assert source.path.is_absolute()
        assert source.path.is_relative_to(tmp_path.resolve())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "models/tiny",
            r"models/tiny is on this machine: write \./models/tiny for it, or models/tiny@main for the Hug",
        ),
        ("models", r"models is on this machine: write \./models for it$"),
        ("models/deep/tiny", r"is on this machine: write \./models/deep/tiny for it$"),
    ],
)
def test_a_folder_that_is_here_is_not_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / text).mkdir(parents=True)
    with pytest.raises(ModelError, match=complaint):
        parse_source(text)
    assert isinstance(parse_source(f"./{text}").source, LocalSource)
    assert parse_source("models/tiny@main").source == HubSource("models/tiny", "main")


def test_a_gguf_file_with_a_path_is_on_this_machine() -> None:
    assert parse_source("models/tiny.gguf").source == LocalSource(Path("models/tiny.gguf").resolve())


def test_secrets_do_not_show_in_the_order() -> None:
    order = parse_source("https://user:password@host/x.gguf?X-Signature=secret")
    assert order.text == "https://host/x.gguf"
    assert isinstance(order.source, WebSource)
    assert "secret" in order.source.url


def test_every_short_name_is_pinned_to_one_content() -> None:
    for alias in ALIASES:
        order = parse_source(alias)
        assert order.name == alias
        assert isinstance(order.source, PackageSource)
        assert "==" in order.source.requirement
        assert order.source.sha256 is not None


def test_a_short_name_and_what_it_stands_for_are_the_same_source() -> None:
    order = parse_source("smollm2-135m")
    assert parse_source(order.text).text == order.text
