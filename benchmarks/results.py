"""Where benchmarks put their tables: a marked part of `docs/performance.md`, or the terminal."""

import datetime
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import torch

_PACKAGES = ("torch", "diffusers", "peft")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured_with(device: torch.device, settings: str) -> str:
    """The line that says what a table was measured with."""
    from importlib.metadata import version

    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    name = _processor() if device.type == "cpu" else str(getattr(torch, device.type).get_device_name(device))
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    return f"measured with: {settings}; {name}{threads}; {versions}; {today}"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def put(part: str, text: str, page: Path | None) -> None:
    """Print a text, or let it take the place of what a page has between `<!-- part -->` and `<!-- end of part -->`."""
    if page is None:
        print(text)
        return
    begin, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, also, after = rest.partition(end)
    if not found or not also:
        raise SystemExit(f"{page} has no lines {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
    print(f"{page}: {part}")
