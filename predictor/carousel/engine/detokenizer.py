"""The text of one sequence, token by token: valid at every delta, cut at stop strings, equal to decoding all at once.

A token's share of the text does not depend on its neighbours, with two exceptions that every tokenizer in use has one
of. A *byte-level* token may hold part of a character; bytes that never make one become U+FFFD. A *byte-fallback* token
(``<0xE4>``) is one byte of a run of such tokens, and the whole run becomes text if all of it is UTF-8, else one U+FFFD
per byte. So what a token adds is learnt once per tokenizer, by decoding it, and kept in a table; only bytes are decoded
again in their context, in windows of a few tokens. A byte-fallback run is held back until it ends or is known to be
invalid, because until then nothing in it is certain. Besides that, a text may lose its first token's leading space.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import lru_cache
from typing import Protocol
from weakref import WeakKeyDictionary

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_BYTES = 4
_WINDOW = 8  # undecided byte-level tokens kept before the window is cut back
_WINDOW_KEPT = 3  # an incomplete character has at most three bytes, so at most three tokens
_SCAN_STEP = 512
_SCAN_END = 1 << 20
_MIN_BYTE_TOKENS = 64  # of the 128 bytes that are no text alone; fewer are pieces that spell U+FFFD


class TextDecoder(Protocol):
    """What is needed of a tokenizer. Ids that it does not know decode to nothing. Compared by identity, hashable."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        ...


class _Pieces:
    """What each token of one tokenizer adds to a text that has begun; filled as tokens are first seen.

    ``text[id]`` is the token's text, ``""`` if it adds none (a skipped special token), or None if it is bytes.
    ``ascii_byte`` and ``high_byte`` are byte-fallback tokens to probe others with, None in any other vocabulary.
    """

    def __init__(self, tokenizer: TextDecoder, skip_special_tokens: bool) -> None:
        self.text: dict[int, str | None] = {}
        self.skip_special_tokens = skip_special_tokens
        self.ascii_byte: int | None = None
        self.high_byte: int | None = None
        self._find_byte_fallback(tokenizer)

    def learn(self, tokenizer: TextDecoder, token_id: int) -> str | None:
        """Fill and return ``text[token_id]``."""
        skip = self.skip_special_tokens
        once = tokenizer.decode([token_id], skip_special_tokens=skip)
        twice = tokenizer.decode([token_id, token_id], skip_special_tokens=skip)
        piece: str | None
        if not twice:
            piece = ""
        elif self.ascii_byte is None:
            piece = None if _REPLACEMENT in twice else twice[len(once) :]
        else:
            piece = None if self._is_fallback_byte(tokenizer, token_id, once) else twice[len(once) :]
        self.text[token_id] = piece
        return piece

    def valid_run(self, tokenizer: TextDecoder, run: list[int]) -> str | None:
        """The text of a few byte-fallback tokens, None if they are not whole characters."""
        assert self.ascii_byte is not None
        # An ASCII byte ahead keeps a leading space from being stripped, and vanishes if the run is invalid.
        text = tokenizer.decode([self.ascii_byte, *run], skip_special_tokens=False)
        return None if text.startswith(_REPLACEMENT) else text[1:]

    def _is_fallback_byte(self, tokenizer: TextDecoder, token_id: int, once: str) -> bool:
        """A byte spoils the run that it joins; an ordinary token of the same text does not."""
        assert self.ascii_byte is not None
        assert self.high_byte is not None
        if len(once) > 1:
            return False
        pair = [self.ascii_byte, token_id] if once == _REPLACEMENT else [token_id, self.high_byte]
        return tokenizer.decode(pair, skip_special_tokens=False) == 2 * _REPLACEMENT

    def _find_byte_fallback(self, tokenizer: TextDecoder) -> None:
        """Look for byte-fallback tokens. The ids of the 256 are contiguous, so overlapping blocks cannot split them."""
        for start in range(0, _SCAN_END, _SCAN_STEP):
            block = range(start, start + 2 * _SCAN_STEP)
            text = tokenizer.decode(list(block), skip_special_tokens=False)
            if not text:
                return
            if text.count(_REPLACEMENT) < _MIN_BYTE_TOKENS:
                continue
            alone = {i: tokenizer.decode([i], skip_special_tokens=False) for i in block}
            high = [i for i, piece in alone.items() if piece == _REPLACEMENT]
            if len(high) < _MIN_BYTE_TOKENS:
                continue
            probe = high[len(high) // 2]
            for i, piece in alone.items():
                if len(piece) == 1 and piece.isascii() and piece.isalnum():
                    pair = tokenizer.decode([i, probe], skip_special_tokens=False)
                    if pair == 2 * _REPLACEMENT:
                        self.ascii_byte, self.high_byte = i, probe
                        return
            return


_pieces: WeakKeyDictionary[TextDecoder, dict[bool, _Pieces]] = WeakKeyDictionary()
_pieces_lock = threading.Lock()


def _pieces_of(tokenizer: TextDecoder, skip_special_tokens: bool) -> _Pieces:
    with _pieces_lock:
        by_skip = _pieces.setdefault(tokenizer, {})
        if skip_special_tokens not in by_skip:
            by_skip[skip_special_tokens] = _Pieces(tokenizer, skip_special_tokens)
        return by_skip[skip_special_tokens]


class _StopAutomaton:
    """Aho-Corasick over the stop strings, none of them empty.

    A state is the longest end of the text that is a beginning of a stop string.
    ``hold[state]``: how many last characters of the text may still become a stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._match: list[str | None] = [None]
        self.hold = [0]
        depth = [0]
        for stop in stops:
            node = 0
            for character in stop:
                if character not in self._children[node]:
                    self._children[node][character] = len(self._children)
                    self._children.append({})
                    self._fail.append(0)
                    self._match.append(None)
                    self.hold.append(0)
                    depth.append(depth[node] + 1)
                node = self._children[node][character]
            self._match[node] = stop
        self._starts = frozenset(self._children[0])
        queue = deque(self._children[0].values())
        while queue:  # breadth first: a node's fail node is shallower, so done before it
            node = queue.popleft()
            fail = self._fail[node]
            self._match[node] = self._match[node] or self._match[fail]
            self.hold[node] = depth[node] if self._children[node] else self.hold[fail]
            for character, child in self._children[node].items():
                self._fail[child] = self._step(fail, character)
                queue.append(child)

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._children[state]:
            state = self._fail[state]
        return self._children[state].get(character, 0)

    def scan(self, state: int, text: str, honour: bool) -> tuple[int, int, str | None]:
        """Read ``text`` up to where a stop string ends first (if ``honour``): (state, characters read, stop string)."""
        if not state and self._starts.isdisjoint(text):
            return 0, len(text), None
        for position, character in enumerate(text, 1):
            state = self._step(state, character)
            if honour and self._match[state] is not None:
                return state, position, self._match[state]
        return state, len(text), None


@lru_cache(maxsize=128)
def _automaton(stops: tuple[str, ...]) -> _StopAutomaton:
    return _StopAutomaton(stops)


class Detokenizer:
    """Incremental text of one sequence.

    The texts returned by :meth:`take` and :meth:`flush` join to exactly ``tokenizer.decode(all ids)``, cut at the stop
    string if one matched. None of them ends inside a character, and none holds text that may yet become a stop string.
    Constant work per token, amortised. Not thread-safe.

    Of several stop strings the one that is complete first wins, reading character by character (where tokens begin and
    end plays no part), and among those that end at the same character the longest.

    Args:
        tokenizer: anything with ``decode``.
        stop: strings that end the text; empty strings are ignored.
        include_stop: whether a matched stop string is part of the text.
        skip_special_tokens: as for ``decode``.
        min_tokens: a stop string that is complete within the first ``min_tokens`` tokens is ordinary text.
    """

    __slots__ = (
        "_automaton",
        "_dead_run",
        "_held",
        "_include_stop",
        "_known",
        "_lead",
        "_min_tokens",
        "_num_tokens",
        "_pieces",
        "_quiet",
        "_ready",
        "_run_length",
        "_run_state",
        "_run_text",
        "_settled",
        "_started",
        "_state",
        "_tail",
        "_taken",
        "_tokenizer",
        "_window",
        "_window_done",
        "matched_stop",
    )

    def __init__(
        self,
        tokenizer: TextDecoder,
        *,
        stop: tuple[str, ...] | list[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        stops = tuple(text for text in stop if text)
        self._tokenizer = tokenizer
        self._pieces = _pieces_of(tokenizer, skip_special_tokens)
        self._known = self._pieces.text
        self._automaton = _automaton(stops) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.matched_stop: str | None = None
        # Text: given out, ready to be, and held back as the possible beginning of a stop string.
        self._taken: list[str] = []
        self._ready: list[str] = []
        self._held = ""
        self._state = 0
        # Until the first character, the tokens so far are decoded together: that is where a space may be stripped.
        self._started = False
        self._lead: list[int] = []
        self._settled = False  # started, and no bytes undecided: a token's piece is simply appended
        # Byte-level: recent undecided tokens, and how many characters of their text are out already.
        self._window: list[int] = []
        self._window_done = 0
        # Byte fallback: the current run, as text while it is valid, and the bytes of its last, incomplete character.
        self._run_length = 0
        self._run_text = ""
        self._run_state = 0
        self._quiet = 0  # leading characters of the run's text that came within min_tokens
        self._tail: list[int] = []
        self._dead_run = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._taken) > 1:
            self._taken = ["".join(self._taken)]
        return self._taken[0] if self._taken else ""

    def append(self, token_id: int) -> str | None:
        """Add the next token. Returns the stop string that it completed, else None. After a match nothing is added."""
        if self.matched_stop is not None:
            return self.matched_stop
        self._num_tokens += 1
        piece = self._known.get(token_id)
        if piece is None or not self._settled:
            return self._append_unsettled(token_id)
        if self._automaton is None:
            self._ready.append(piece)
            return None
        return self._feed(piece, self._honour)

    def take(self) -> str:
        """Text that can be given out now and was not before; may be empty."""
        if not self._ready:
            return ""
        text = self._ready[0] if len(self._ready) == 1 else "".join(self._ready)
        self._ready.clear()
        if text:
            self._taken.append(text)
        return text

    def flush(self) -> str:
        """The sequence has ended: all text not given out yet, with U+FFFD for characters that stayed incomplete.

        After a stop string matched there is nothing but what :meth:`take` would return. Append nothing afterwards.
        """
        if self.matched_stop is None:
            self._ready += [self._held, self._undecided()]
            self._held = ""
            self._clear_undecided()
        return self.take()

    @property
    def _honour(self) -> bool:
        return self._num_tokens > self._min_tokens

    def _append_unsettled(self, token_id: int) -> str | None:
        """A token not seen before, or bytes, or one after bytes, or at the start."""
        piece = self._known.get(token_id)
        if piece is None and token_id not in self._known:
            piece = self._pieces.learn(self._tokenizer, token_id)
        if piece == "":
            return None
        if piece is None:
            return self._append_raw(token_id) if self._pieces.ascii_byte is None else self._append_run(token_id)
        if self._settle() is not None:
            return self.matched_stop
        if not self._started:
            self._lead.append(token_id)
            piece = self._decode(self._lead)
            if not piece:
                return None
        self._started = self._settled = True
        return self._feed(piece, self._honour)

    def _append_raw(self, token_id: int) -> str | None:
        """A byte-level token that is not whole characters. Only a last U+FFFD of the text so far is still open."""
        self._settled = False
        if not self._started:
            self._window = self._lead
            self._started = True
        self._window.append(token_id)
        text = self._decode(self._window)
        end = len(text) - text.endswith(_REPLACEMENT)
        new = text[self._window_done : end]
        self._window_done = end
        if end == len(text):
            self._clear_undecided()
        elif len(self._window) > _WINDOW:
            # UTF-8 finds its step again at any lead byte, so the last character is the same seen from nearby.
            del self._window[:-_WINDOW_KEPT]
            self._window_done = len(self._decode(self._window)) - 1
        return self._feed(new, self._honour)

    def _append_run(self, token_id: int) -> str | None:
        """A byte-fallback token."""
        if not self._run_length:
            self._run_state = self._state
        self._settled = False
        self._run_length += 1
        if not self._started and not self._run_text:
            self._lead.append(token_id)
        if self._dead_run:
            return self._feed(_REPLACEMENT, self._honour)
        self._tail.append(token_id)
        characters = self._pieces.valid_run(self._tokenizer, self._tail)
        if characters is None:
            if len(self._tail) < _MAX_CHARACTER_BYTES:
                return None
            text = self._undecided()
            self._dead_run = self._started = True
            return self._feed(text, self._honour)
        self._tail.clear()
        if not self._started and not self._run_text:
            characters = self._decode(self._lead)
        self._run_text += characters
        if self._automaton is None:
            return None
        if not self._honour:
            self._quiet = len(self._run_text)
        # Should the text end here the run is valid, so a stop string in it counts at once.
        self._run_state, _, stop = self._automaton.scan(self._run_state, characters, self._honour)
        return None if stop is None else self._settle()

    def _settle(self) -> str | None:
        """What follows does not change the undecided bytes: feed their text. Returns the stop string it completed."""
        text = self._undecided()
        if text:
            valid_run = self._run_length and not self._tail
            if valid_run and self._quiet:
                self._feed(text[: self._quiet], False)
            self._feed(text[self._quiet :] if valid_run else text, bool(valid_run) or self._honour)
            self._started = True
        self._clear_undecided()
        return self.matched_stop

    def _undecided(self) -> str:
        """The text of the undecided bytes, not fed yet, if nothing follows them."""
        if self._window:
            return _REPLACEMENT
        if self._dead_run:
            return ""
        return _REPLACEMENT * self._run_length if self._tail else self._run_text

    def _clear_undecided(self) -> None:
        self._window = []
        self._window_done = self._run_length = self._quiet = 0
        self._run_text = ""
        self._tail = []
        self._dead_run = False
        self._settled = self._started

    def _feed(self, text: str, honour: bool) -> str | None:
        """Decided text, on its way out through the stop strings."""
        if self._automaton is None:
            self._ready.append(text)
            return None
        state, end, stop = self._automaton.scan(self._state, text, honour)
        pending = self._held + text
        if stop is not None:
            end += len(self._held) - (0 if self._include_stop else len(stop))
            self._held = ""
            self.matched_stop = stop
        else:
            end = len(pending) - self._automaton.hold[state]
            self._held = pending[end:]
            self._state = state
        self._ready.append(pending[:end])
        return stop

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._pieces.skip_special_tokens)
