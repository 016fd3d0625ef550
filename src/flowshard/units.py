"""Numbers for people, and from them. Needs no torch."""

import re

_POWERS = {"M": 2, "G": 3, "T": 4}


def parse_amount(text: str) -> int | None:
    """The bytes of a text such as `80GB` (10^9), `22.5GiB` (2^30) or `500M`; None if it is no such amount above zero."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([MGT])(i?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        return None
    number = float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].upper()]
    return int(number) if number >= 1 else None


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
