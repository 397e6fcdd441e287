"""Numbers as people read them."""

import pytest

from shared.models.units import show_bytes, show_parameters


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (98_362_432, "98.4 MB"),
        (100_000_000, "100 MB"),
        (4_683_074_240, "4.68 GB"),
        (2 * 10**12, "2 TB"),
    ],
)
def test_sizes_have_three_digits_and_a_unit(num_bytes: int, text: str) -> None:
    assert show_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"), [(134_515_008, "135M"), (1_543_714_304, "1.54B"), (95_424, "95.4k"), (7, "7")]
)
def test_parameters_are_counted_as_models_are_called(count: int, text: str) -> None:
    assert show_parameters(count) == text
