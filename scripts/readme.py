"""Write the settings table of carousel.config into README.md, between its markers; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- settings: make readme writes this table -->"
END = "<!-- /settings -->"


def refreshed(text: str, table: str) -> str:
    """The README's text with this table between the markers.

    Raises:
        ValueError: when the markers are not there, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"README.md must hold {BEGIN} and, behind it, {END}, once each")
    return f"{before}{BEGIN}\n\n{table.strip()}\n\n{END}{after}"


def main(argv: list[str]) -> int:
    from carousel.config import settings_table

    text = README.read_text("utf-8")
    wanted = refreshed(text, settings_table())
    if text == wanted:
        return 0
    if "--check" in argv:
        print("README.md: the settings table is not carousel.config's: make readme", file=sys.stderr)
        return 1
    README.write_text(wanted, "utf-8")
    print("README.md: settings table refreshed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
