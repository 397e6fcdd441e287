"""Raw GGUF blocks become the numbers that the `gguf` package makes of them."""

import gguf
import numpy as np
import pytest

from services.executor.quantization import gguf_blocks
from services.executor.quantization.gguf_blocks import dequantize_into, expected_bytes

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "BF16")


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Blocks of any content; half-precision scales that happen to be no numbers are made ordinary ones."""
    size = expected_bytes(kind, (rows, columns))
    blocks = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    if kind == "BF16":
        blocks[:, 1::2] &= 0xBF
        return blocks
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    halves = blocks.reshape(-1, block_bytes)
    halves[:, 1::2] &= 0x8F  # exponents below 4: finite wherever the scales lie
    return blocks


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_gguf_package(kind: str) -> None:
    blocks = random_blocks(kind, 7, 512)
    out = np.full((7, 512), np.nan, np.float32)
    dequantize_into(out, blocks, kind)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 10
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("num_bytes", [1, 4 * 64 * 3, 4 * 64 * 5])
def test_pieces_fit_together(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks("Q8_0", 11, 64)
    whole, pieces = np.empty((11, 64), np.float32), np.empty((11, 64), np.float32)
    dequantize_into(whole, blocks, "Q8_0")
    monkeypatch.setattr(gguf_blocks, "_BYTES_AT_ONCE", num_bytes)
    dequantize_into(pieces, blocks, "Q8_0")
    np.testing.assert_array_equal(pieces, whole)


def test_stored_sizes_are_whole_blocks() -> None:
    assert expected_bytes("Q4_1", (3, 64)) == (3, 2 * 20)
    assert expected_bytes("Q4_K", (3, 512)) == (3, 2 * 144)
    with pytest.raises(ValueError, match="rows of 100 numbers are not whole Q4_1 blocks of 32"):
        expected_bytes("Q4_1", (3, 100))
    with pytest.raises(ValueError, match="Q9_9 is not a GGUF type"):
        expected_bytes("Q9_9", (3, 64))


def test_a_type_that_cannot_be_read_is_refused() -> None:
    blocks = np.zeros(expected_bytes("Q8_K", (1, 256)), np.uint8)
    with pytest.raises(ValueError, match="Q8_K"):
        dequantize_into(np.empty((1, 256), np.float32), blocks, "Q8_K")
