"""Numbers for people."""


def amount(number: float) -> str:
    """Bytes."""
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}" if number < 10 * limit else f"{number / limit:.1f} {unit}"
    return f"{number:.0f} B"


def count(number: float) -> str:
    """How many."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number:.0f}"


def duration(number: float) -> str:
    """Seconds."""
    return f"{number:.3g} s" if number >= 0.1 else f"{1000 * number:.3g} ms"
