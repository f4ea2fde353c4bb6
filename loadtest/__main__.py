"""``python -m loadtest ARGUMENTS``: locust with this folder's locustfile; ``--help`` lists every option."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    sys.argv[1:1] = ["-f", str(Path(__file__).with_name("locustfile.py"))]
    from locust.main import main as locust  # it patches the standard library

    locust()


if __name__ == "__main__":
    main()
