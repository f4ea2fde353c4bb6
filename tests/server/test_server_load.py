"""What a server does when its model has been loaded."""

from __future__ import annotations

import gc

import pytest

from carousel import standalone
from carousel.config import Settings
from carousel.server import load_engine


def test_what_lives_when_the_engine_starts_is_out_of_the_collectors_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection looks at all that lives, and no stream goes on meanwhile."""
    engine = [object()]
    monkeypatch.setattr(standalone, "fetch", lambda settings: None)
    monkeypatch.setattr(standalone, "load", lambda *_: None)
    monkeypatch.setattr(standalone, "start_engine", lambda *_: engine)
    assert gc.get_freeze_count() == 0
    try:
        assert load_engine(Settings()) is engine
        assert gc.get_freeze_count() > 10_000
        assert not any(found is engine for found in gc.get_objects())
    finally:
        gc.unfreeze()
