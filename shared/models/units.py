"""Numbers as people read them."""

_STEPS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def show_bytes(num_bytes: int) -> str:
    """A size with three significant digits and a decimal unit, such as `98.4 MB`."""
    for step, prefix in _STEPS:
        if num_bytes >= step:
            return f"{_three_digits(num_bytes / step)} {prefix}B"
    return f"{num_bytes} B"


def show_parameters(count: int) -> str:
    """A number of weights the way models are called, such as `135M` or `1.5B`."""
    for step, suffix in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= step:
            return f"{_three_digits(count / step)}{suffix}"
    return str(count)


def counted(count: int, noun: str) -> str:
    """A number of things, such as `1 prompt` or `2 prompts`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _three_digits(value: float) -> str:
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
