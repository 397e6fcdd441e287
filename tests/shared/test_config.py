"""Configuration from the environment: every type, every problem at once, no secret shown."""

import dataclasses
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import Config, MeshConfig, describe, explain, load, setting, variable
from shared.errors import ConfigError
from shared.ids import Service


@dataclasses.dataclass(frozen=True, slots=True)
class FishConfig(Config):
    """One setting of every type."""

    prefix: ClassVar[str] = "SHOAL_GATEWAY_"

    name: str = setting("cod", "what to call it")
    colour: str = setting("blue", "what it looks like", choices=("blue", "red"))
    num_fins: int = setting(7, "how many", minimum=1, maximum=9)
    depth_m: float = setting(2.5, "how deep", minimum=0)
    chill_c: float = setting(0.0, "how cold", maximum=30)
    weight_g: float = setting(10.0, "how heavy")
    is_shy: bool = setting(False, "whether it hides")
    home: Path = setting(Path("~/reef"), "where it lives")
    friends: tuple[str, ...] = setting((), "whom it knows")
    max_age_s: float | None = setting(None, "when it dies", minimum=1)
    key: str = setting("", "how to open it", is_secret=True)
    keys: tuple[str, ...] = setting((), "how else to open it", is_secret=True)

    def __post_init__(self) -> None:
        if self.is_shy and self.friends:
            raise ValueError("a shy fish has no friends")


def _load(**settings: str) -> FishConfig:
    return load(FishConfig, {f"SHOAL_GATEWAY_{name}": text for name, text in settings.items()})


def _problems(**settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _load(**settings)
    return str(caught.value)


def test_nothing_set_gives_the_defaults() -> None:
    assert load(FishConfig, {"PATH": "/bin", "HOME": "/root"}) == FishConfig()


def test_each_type_is_read() -> None:
    config = _load(
        NAME="eel",
        COLOUR="red",
        NUM_FINS="9",
        DEPTH_M="1e3",
        IS_SHY="no",
        HOME="/sea",
        FRIENDS=" a, b ,,c",
        MAX_AGE_S="4",
    )
    assert config == FishConfig(
        name="eel", colour="red", num_fins=9, depth_m=1000.0, home=Path("/sea"), friends=("a", "b", "c"), max_age_s=4.0
    )
    assert isinstance(config.num_fins, int)


@pytest.mark.parametrize("text", ["1", "true", "Yes", "ON"])
def test_yes_in_four_spellings(text: str) -> None:
    assert _load(IS_SHY=text).is_shy is True


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF"])
def test_no_in_four_spellings(text: str) -> None:
    assert _load(IS_SHY=text).is_shy is False


def test_an_optional_setting_is_none_when_empty() -> None:
    assert _load(MAX_AGE_S="").max_age_s is None


def test_an_empty_list_is_an_empty_tuple() -> None:
    assert _load(FRIENDS="").friends == ()


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("COLOUR", "green", "'green': must be one of blue, red"),
        ("NUM_FINS", "2.5", "'2.5': must be a whole number"),
        ("NUM_FINS", "", "'': must be a whole number"),
        ("NUM_FINS", "0", "'0': must be 1 to 9"),
        ("NUM_FINS", "10", "'10': must be 1 to 9"),
        ("DEPTH_M", "deep", "'deep': must be a number"),
        ("DEPTH_M", "-0.1", "'-0.1': must be at least 0"),
        ("CHILL_C", "31", "'31': must be at most 30"),
        ("WEIGHT_G", "nan", "'nan': must be a finite number"),
        ("WEIGHT_G", "inf", "'inf': must be a finite number"),
        ("IS_SHY", "maybe", "'maybe': must be true or false"),
        ("IS_SHY", "", "'': must be true or false"),
        ("HOME", "", "'': must be a path"),
        ("MAX_AGE_S", "0", "'0': must be at least 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(name: str, text: str, problem: str) -> None:
    assert _problems(**{name: text}) == f"SHOAL_GATEWAY_{name}={problem}"


def test_all_problems_are_told_at_once() -> None:
    problems = _problems(COLOUR="green", NUM_FINS="x", DEPHT_M="3").split("; ")
    assert problems[:2] == [
        "SHOAL_GATEWAY_COLOUR='green': must be one of blue, red",
        "SHOAL_GATEWAY_NUM_FINS='x': must be a whole number",
    ]
    assert problems[2] == "SHOAL_GATEWAY_DEPHT_M is not a setting"
    assert problems[3] == "did you mean SHOAL_GATEWAY_DEPTH_M?"


def test_an_unknown_variable_without_a_near_one_gets_no_guess() -> None:
    assert _problems(QQQQQQQQQ="1") == "SHOAL_GATEWAY_QQQQQQQQQ is not a setting"


def test_a_rule_between_settings_is_a_configuration_error() -> None:
    assert _problems(IS_SHY="1", FRIENDS="eel") == "SHOAL_GATEWAY_*: a shy fish has no friends"


def test_a_service_ignores_the_settings_of_the_mesh_and_of_others() -> None:
    load(FishConfig, {"SHOAL_MODEL": "tiny", "SHOAL_EXECUTOR_DEVICE": "cpu", "OTHER": "1"})


def test_the_mesh_ignores_the_settings_of_services_but_not_misspelt_ones() -> None:
    load(MeshConfig, {f"SHOAL_{service.upper()}_ANYTHING": "1" for service in Service})
    with pytest.raises(ConfigError, match="SHOAL_MODLE is not a setting; did you mean SHOAL_MODEL"):
        load(MeshConfig, {"SHOAL_MODLE": "tiny"})
    with pytest.raises(ConfigError, match="SHOAL_EXECUTER_DEVICE is not a setting"):
        load(MeshConfig, {"SHOAL_EXECUTER_DEVICE": "cpu"})


def test_secrets_are_never_shown() -> None:
    shown = describe(_load(KEY="hunter2", KEYS="hunter3,hunter4"))
    assert "hunter" not in str(shown)
    assert shown["SHOAL_GATEWAY_KEY"] == shown["SHOAL_GATEWAY_KEYS"] == "(set)"
    assert describe(FishConfig())["SHOAL_GATEWAY_KEY"] == ""


@dataclasses.dataclass(frozen=True, slots=True)
class _SecretNumber(Config):
    prefix: ClassVar[str] = "SHOAL_GATEWAY_"
    pin: int = setting(0, "a number to keep", is_secret=True)


def test_a_malformed_secret_is_not_shown_either() -> None:
    with pytest.raises(ConfigError) as caught:
        load(_SecretNumber, {"SHOAL_GATEWAY_PIN": "hunter2"})
    assert str(caught.value) == "SHOAL_GATEWAY_PIN=(hidden): must be a whole number"


def test_a_password_inside_an_address_is_not_shown() -> None:
    config = load(MeshConfig, {"SHOAL_NATS_URL": "nats://me:hunter2@host:4222,nats://token@other"})
    assert config.nats_url == "nats://me:hunter2@host:4222,nats://token@other"
    assert describe(config)["SHOAL_NATS_URL"] == "nats://(hidden)@host:4222,nats://(hidden)@other"


def test_every_value_in_force_is_described() -> None:
    shown = describe(_load(FRIENDS="a,b", NUM_FINS="3"))
    assert shown["SHOAL_GATEWAY_FRIENDS"] == "a,b"
    assert shown["SHOAL_GATEWAY_NUM_FINS"] == "3"
    assert shown["SHOAL_GATEWAY_MAX_AGE_S"] == ""
    assert len(shown) == len(dataclasses.fields(FishConfig))


def test_what_is_described_loads_to_the_same_configuration() -> None:
    config = _load(FRIENDS="a,b", NUM_FINS="3", DEPTH_M="0.1", HOME="/sea", MAX_AGE_S="2")
    assert load(FishConfig, describe(config)) == config


def test_every_setting_is_explained_with_its_default_and_range() -> None:
    rows = {name: (default, text) for name, default, text in explain(FishConfig)}
    assert rows["SHOAL_GATEWAY_COLOUR"] == ("blue", "what it looks like (blue, red)")
    assert rows["SHOAL_GATEWAY_NUM_FINS"] == ("7", "how many (1 to 9)")
    assert rows["SHOAL_GATEWAY_DEPTH_M"] == ("2.5", "how deep (at least 0)")
    assert rows["SHOAL_GATEWAY_CHILL_C"] == ("0.0", "how cold (at most 30)")
    assert rows["SHOAL_GATEWAY_WEIGHT_G"] == ("10.0", "how heavy")


def test_a_variable_is_prefix_and_field() -> None:
    assert variable(MeshConfig, "nats_url") == "SHOAL_NATS_URL"


@given(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])))
def test_any_text_is_taken_or_refused_with_a_sentence(text: str) -> None:
    for field in dataclasses.fields(FishConfig):
        name = variable(FishConfig, field.name)
        try:
            config = load(FishConfig, {name: text})
        except ConfigError as error:
            sentence = str(error)
        else:
            sentence = f"{name}={getattr(config, field.name)}"
        assert sentence.startswith(f"{name}=")
