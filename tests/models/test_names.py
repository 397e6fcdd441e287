"""What a model may be called."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ModelError
from shared.models.names import check_name, derive_name, folder_name

_PART = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z")


@pytest.mark.parametrize("name", ["a", "smollm2-135m", "Qwen/Qwen2.5-0.5B", "a.b_c-d", "Model.Q4_1", "1"])
def test_plain_names_are_allowed(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "/", "a/", "/a", "../a", "a/../b", "a/b/c", ".hidden", "-x", "a--b", "a..b", "a.", "a b"),
        *("a\\b", "a\0", "ä", "a/-b", "x" * 201, "a\n"),
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="cannot name a model"):
        folder_name(name)


def test_a_name_with_a_slash_becomes_one_folder() -> None:
    assert folder_name("Qwen/Qwen2.5-0.5B") == "Qwen--Qwen2.5-0.5B"


@given(first=st.tuples(_PART, _PART), second=_PART)
def test_no_two_names_share_a_folder(first: tuple[str, str], second: str) -> None:
    names = {"/".join(first), second}
    try:
        folders = {folder_name(name) for name in names}
    except ModelError:
        return
    assert len(folders) == len(names)


@given(st.text(max_size=300))
def test_a_derived_name_is_always_allowed(text: str) -> None:
    try:
        name = derive_name(text)
    except ModelError:
        assert not any(c.isascii() and c.isalnum() for c in text)
    else:
        assert check_name(name) == name


def test_a_derived_name_keeps_what_it_can() -> None:
    assert derive_name("SmolLM2-135M-Instruct.Q4_1") == "SmolLM2-135M-Instruct.Q4_1"
    assert derive_name("my model (v2)") == "my-model-v2"
