"""Logits to tokens, for the whole batch at once, each sequence by its own parameters.

Per row, in this order, and only where a row asks for it: logit_bias; EOS and stop token ids out of reach until
min_tokens (with ignore_eos the EOS ids stay in reach, they just stop nothing); repetition penalty over prompt and
output (a positive logit is divided by it, a negative one multiplied); frequency penalty times the number of occurrences
in the output, and presence penalty if there is one, subtracted; then temperature, top_k, top_p, min_p and the draw.

The draw is an argmax of logits plus noise, and the noise a function of the sequence's seed, the number of its output
tokens and the token id alone. So the same seed gives the same text in any batch, and after a preemption.

Log-probabilities are those of the model itself: the log-softmax of the logits as the model gave them, before any of the
above. A rank is one plus the number of tokens with a larger logit. ``top`` holds the most likely tokens, whether the
chosen one is among them or not.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

import carousel_kernels as ck
from carousel.engine.device import Device, Readback
from carousel.engine.request import SamplingParams, Sequence, TokenLogprob

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIN_TEMPERATURE = 1e-5  # below this logits / temperature may overflow; the draw would be the argmax anyway
_PLANS_KEPT = 8
_PROMPT_SLICE = 1 << 23  # logits per slice of prompt_logprobs: bounds its temporaries to some tens of MB
_uids = itertools.count()

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


def mix_seed(seed: int, index: int) -> int:
    """The seed of choice ``index`` of a request with ``seed`` (any integer): well mixed, a signed 64-bit integer."""
    mixed = (seed + (index + 1) * _GOLDEN) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    mixed ^= mixed >> 31
    return mixed - (1 << 64) if mixed >> 63 else mixed


@dataclass(slots=True)
class SampledToken:
    """``token_id`` -1: the row held NaN or infinity, or nothing to choose from; only this sequence has failed."""

    token_id: int
    logprob: TokenLogprob | None


class SequenceSampler:
    """What sampling keeps about one sequence, across steps and preemptions.

    Args:
        params: validated against ``vocab_size``.
        seed: of the request, any integer; with ``index``, the number of the choice, it determines every draw.
        prompt_ids: copied, and only if the repetition penalty needs them.
        eos_ids: ids that are out of reach until ``min_tokens``, unless ``ignore_eos``.
        vocab_size: ids at or above it are left out.
    """

    __slots__ = (
        "_counts",
        "_distinct",
        "_ids",
        "_prompt_ids",
        "_slots",
        "guarded_ids",
        "params",
        "penalised",
        "seed",
        "uid",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        index: int,
        prompt_ids: Iterable[int],
        eos_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self.uid = next(_uids)
        self.params = params
        self.seed = mix_seed(seed, index)
        self.penalised = bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)
        guarded = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_ids
        self.guarded_ids = sorted(i for i in guarded if 0 <= i < vocab_size) if params.min_tokens else []
        self._prompt_ids = [i for i in prompt_ids if i < vocab_size] if params.repetition_penalty != 1.0 else []
        # The distinct tokens that a penalty falls on, and how often each is in the output. Made when first needed:
        # a long prompt costs nothing where no token is sampled.
        self._slots: dict[int, int] | None = None
        self._distinct = 0
        self._ids: Ids = np.empty(0, dtype=np.int64)
        self._counts: Floats = np.empty(0, dtype=np.float32)

    def update(self, token_id: int) -> None:
        """A token has been added to the output. To be called once for each, never again after a preemption."""
        if not self.penalised:
            return
        slots = self._counting()
        slot = slots.get(token_id)
        if slot is None:
            slot = slots[token_id] = self._distinct
            self._distinct += 1
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros(slot + 64, dtype=np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(slot + 64, dtype=np.float32)))
            self._ids[slot] = token_id
        self._counts[slot] += 1

    def penalty_counts(self) -> tuple[Ids, Floats]:
        """Distinct token ids of the output (and, with a repetition penalty, of the prompt), and their counts in the
        output. Views: valid until the next update."""
        self._counting()
        return self._ids[: self._distinct], self._counts[: self._distinct]

    def _counting(self) -> dict[int, int]:
        if self._slots is None:
            distinct = list(dict.fromkeys(self._prompt_ids))
            self._prompt_ids = []
            self._slots = {token_id: slot for slot, token_id in enumerate(distinct)}
            self._distinct = len(distinct)
            self._ids = np.array(distinct, dtype=np.int64)
            self._counts = np.zeros(len(distinct), dtype=np.float32)
        return self._slots


_Filters = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""temperature, top_k, top_p, min_p, seeds"""


@dataclass(slots=True)
class _Plan:
    """What a batch needs, as far as it follows from which sequences are in it: built once per composition.

    Tensors are on the device and have one entry per row concerned; lists are row numbers.
    """

    plain: bool = True
    random_rows: list[int] = field(default_factory=list)
    random_index: torch.Tensor | None = None  # None: all rows
    filters: _Filters | None = None  # of the random rows
    bias: tuple[torch.Tensor, torch.Tensor] | None = None  # int64 [2, n]: rows, token ids; float32 [n]
    penalised_rows: list[int] = field(default_factory=list)
    penalties: Floats = field(default_factory=lambda: np.empty((3, 0), dtype=np.float32))
    guarded_rows: list[int] = field(default_factory=list)  # with min_tokens
    guarded_now: list[int] = field(default_factory=list)  # those of which are not past it; what ``guard`` is for
    guard: torch.Tensor | None = None  # int64 [2, n]: rows, token ids
    adjusts: bool = False  # logits change before the choice
    logprob_rows: list[int] = field(default_factory=list)
    logprob_index: torch.Tensor | None = None  # None: all rows
    logprob_counts: list[int] = field(default_factory=list)


class _Logprobs:
    """Log-probabilities on their way from the device. ``chosen`` int64 [R] (negative: unusable row) under the
    log-softmax of ``raw`` float32 [R, V], with ``counts[r]`` most likely tokens."""

    __slots__ = ("_counts", "_read")

    def __init__(self, device: Device, raw: torch.Tensor, chosen: torch.Tensor, counts: list[int]) -> None:
        most = min(max(counts), raw.shape[1])
        self._counts = counts
        self._read = device.read(chosen, *ck.token_logprobs(raw, chosen, most))

    def wait(self) -> list[TokenLogprob]:
        chosen, logprobs, ranks, top_ids, top_logprobs = (values.tolist() for values in self._read.wait())
        found = []
        for row, (token_id, logprob) in enumerate(zip(chosen, logprobs, strict=True)):
            if logprob == logprob:
                count = self._counts[row]
                top = list(zip(top_ids[row][:count], top_logprobs[row][:count], strict=True))
                found.append(TokenLogprob(token_id, logprob, ranks[row], top))
            else:  # NaN
                found.append(TokenLogprob(token_id, None, 0, []))
        return found


@dataclass(slots=True)
class Draw:
    """A batch's next tokens, on their way from the device. ``tokens`` int64 [R] are there; -1: see
    :class:`SampledToken`."""

    tokens: torch.Tensor
    read: Readback
    logprob_rows: list[int] = field(default_factory=list)
    logprobs: _Logprobs | None = None

    def wait(self) -> list[SampledToken]:
        """The tokens, in the order of the rows, once the device has them."""
        tokens = self.read.wait()[0].tolist()
        found: dict[int, TokenLogprob] = {}
        if self.logprobs is not None:
            found = dict(zip(self.logprob_rows, self.logprobs.wait(), strict=True))
        return [SampledToken(token, found.get(row) if token >= 0 else None) for row, token in enumerate(tokens)]


@dataclass(slots=True)
class PromptDraw:
    """Log-probabilities of some tokens of a prompt, on their way from the device."""

    parts: list[_Logprobs]

    def wait(self) -> list[TokenLogprob]:
        return [logprob for part in self.parts for logprob in part.wait()]


class SamplerLike(Protocol):
    """What the loop needs of a sampler."""

    def launch(
        self, logits: torch.Tensor, sequences: list[Sequence], last_tokens: torch.Tensor | None = None
    ) -> Draw: ...

    def launch_prompt(self, logits: torch.Tensor, token_ids: list[int], k: int) -> PromptDraw: ...


class Sampler:
    """Chooses the next token of every row of a batch. Not thread-safe."""

    def __init__(self, vocab_size: int, device: Device | torch.device | str) -> None:
        self.vocab_size = vocab_size
        self._device = device if isinstance(device, Device) else Device.of(torch.device(device))
        self.device = self._device.torch_device
        self._plans: OrderedDict[tuple[int, ...], _Plan] = OrderedDict()

    @torch.inference_mode()
    def launch(self, logits: torch.Tensor, sequences: list[Sequence], last_tokens: torch.Tensor | None = None) -> Draw:
        """Choose one token per row, without waiting for the device.

        The sequences' samplers are not updated: ``update`` belongs to who appends the token. A row with NaN or
        infinite logits, or with none that is finite, gets token id -1 and disturbs no other row.

        Args:
            logits: float32 [R, V], row r of ``sequences[r]``; may be overwritten.
            sequences: of at least one, R; each with at most one pending token.
            last_tokens: int64 [R], the last token of each sequence; needed where a penalised one's is pending.

        Raises:
            ValueError: if the shape of ``logits`` does not fit.
        """
        if logits.shape != (len(sequences), self.vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}, not {(len(sequences), self.vocab_size)}")
        plan = self._plan(sequences)
        if plan.plain:
            tokens = ck.largest(logits)[0]
            return Draw(tokens, self._device.read(tokens))
        raw: torch.Tensor | None = None
        if plan.logprob_rows:
            raw = logits if plan.logprob_index is None else logits.index_select(0, plan.logprob_index)
            if raw is logits and plan.adjusts:
                raw = logits.clone()
        self._adjust(logits, plan, sequences, last_tokens)
        tokens, failed = ck.largest(logits)
        if plan.filters is not None:
            self._draw(logits, plan, plan.filters, sequences, tokens, failed)
        logprobs = None
        if raw is not None:
            chosen = tokens if plan.logprob_index is None else tokens.index_select(0, plan.logprob_index)
            logprobs = _Logprobs(self._device, raw, chosen, plan.logprob_counts)
        return Draw(tokens, self._device.read(tokens), plan.logprob_rows, logprobs)

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        """:meth:`launch`, and wait; none for no rows."""
        if not sequences and not len(logits):
            return []
        return self.launch(logits, sequences).wait()

    @torch.inference_mode()
    def launch_prompt(self, logits: torch.Tensor, token_ids: list[int], k: int) -> PromptDraw:
        """Log-probabilities of known tokens: row p of ``logits`` float32 [P, V] is the prediction of ``token_ids[p]``.

        ``k`` most likely tokens are listed with each. Where the row holds NaN, logprob is None, rank 0, nothing listed.
        """
        step = max(1, _PROMPT_SLICE // self.vocab_size)
        parts = []
        for start in range(0, len(token_ids), step):
            part = token_ids[start : start + step]
            chosen = self._tensor(part, torch.int64)
            parts.append(_Logprobs(self._device, logits[start : start + len(part)], chosen, [k] * len(part)))
        return PromptDraw(parts)

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: list[int], k: int) -> list[TokenLogprob]:
        """:meth:`launch_prompt`, and wait."""
        return self.launch_prompt(logits, token_ids, k).wait()

    def _plan(self, sequences: list[Sequence]) -> _Plan:
        key = tuple([sequence.sampler.uid for sequence in sequences])
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan([sequence.sampler for sequence in sequences])
            if len(self._plans) > _PLANS_KEPT:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan

    def _make_plan(self, samplers: list[SequenceSampler]) -> _Plan:
        params = [sampler.params for sampler in samplers]
        plan = _Plan(plain=all(p.plain for p in params))
        if plan.plain:
            return plan
        rows = range(len(samplers))
        plan.random_rows = [row for row in rows if params[row].temperature >= _MIN_TEMPERATURE]
        if plan.random_rows:
            plan.random_index = self._index(plan.random_rows, len(samplers))
            chosen = [params[row] for row in plan.random_rows]
            plan.filters = (
                self._tensor([p.temperature for p in chosen], torch.float32),
                self._tensor([p.top_k for p in chosen], torch.int64),
                self._tensor([p.top_p for p in chosen], torch.float32),
                self._tensor([p.min_p for p in chosen], torch.float32),
                self._tensor([samplers[row].seed for row in plan.random_rows], torch.int64),
            )
        biases = [(row, token, bias) for row in rows for token, bias in params[row].logit_bias.items()]
        if biases:
            where = self._tensor([(row, token) for row, token, _ in biases], torch.int64).T
            plan.bias = (where, self._tensor([bias for _, _, bias in biases], torch.float32))
        plan.penalised_rows = [row for row in rows if samplers[row].penalised]
        penalties = [
            (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for p in (params[row] for row in plan.penalised_rows)
        ]
        plan.penalties = np.array(penalties, dtype=np.float32).reshape(-1, 3).T
        plan.guarded_rows = [row for row in rows if samplers[row].guarded_ids]
        plan.adjusts = bool(biases or plan.penalised_rows or plan.guarded_rows)
        plan.logprob_rows = [row for row in rows if params[row].logprobs is not None]
        plan.logprob_index = self._index(plan.logprob_rows, len(samplers))
        plan.logprob_counts = [params[row].logprobs or 0 for row in plan.logprob_rows]
        return plan

    def _adjust(
        self, logits: torch.Tensor, plan: _Plan, sequences: list[Sequence], last_tokens: torch.Tensor | None
    ) -> None:
        """Bias, guard and penalties, in place, touching only the logits that change."""
        if plan.bias is not None:
            where, values = plan.bias
            logits[where[0], where[1]] += values
        if plan.guarded_rows:
            self._guard(logits, plan, sequences)
        if plan.penalised_rows:
            self._penalise(logits, plan, sequences, last_tokens)

    def _guard(self, logits: torch.Tensor, plan: _Plan, sequences: list[Sequence]) -> None:
        now = [
            row
            for row in plan.guarded_rows
            if sequences[row].num_sampled_tokens < sequences[row].sampler.params.min_tokens
        ]
        if now != plan.guarded_now:
            pairs = [(row, token) for row in now for token in sequences[row].sampler.guarded_ids]
            plan.guarded_now = now
            plan.guard = self._tensor(pairs, torch.int64).T if pairs else None
        if plan.guard is not None:
            logits[plan.guard[0], plan.guard[1]] = float("-inf")

    def _penalise(
        self, logits: torch.Tensor, plan: _Plan, sequences: list[Sequence], last_tokens: torch.Tensor | None
    ) -> None:
        """Penalise what is in the known output and, for the repetition penalty, in the prompt; then, with what the
        device alone knows, each row's pending token, which the host cannot have counted."""
        found = [sequences[row].sampler.penalty_counts() for row in plan.penalised_rows]
        lengths = [len(ids) for ids, _ in found]
        owners = np.repeat(np.arange(len(found)), lengths)
        upload = self._device.upload
        rows = upload(torch.from_numpy(np.array(plan.penalised_rows)[owners]))
        ids = upload(torch.from_numpy(np.concatenate([ids for ids, _ in found])))
        counts = upload(torch.from_numpy(np.concatenate([count for _, count in found])))
        penalties = self._tensor_of(plan.penalties[:, owners])
        waiting = [n for n, row in enumerate(plan.penalised_rows) if sequences[row].num_pending_tokens]
        if not waiting:
            logits[rows, ids] = _penalised(logits[rows, ids], penalties, counts)
            return
        if last_tokens is None:
            raise AssertionError("a penalised sequence's last token is pending, and nobody says where it is")
        penalised = self._tensor(plan.penalised_rows, torch.int64)
        last = last_tokens.index_select(0, penalised)
        owner = upload(torch.from_numpy(owners))
        seen = torch.zeros(len(found), device=self.device)
        seen.index_add_(0, owner, torch.where(ids == last.index_select(0, owner), counts, 0.0))
        chosen = self._tensor(waiting, torch.int64)
        where = penalised[chosen], last[chosen]
        values = _penalised(logits[where], self._tensor_of(plan.penalties)[:, chosen], seen[chosen] + 1.0)
        logits[rows, ids] = _penalised(logits[rows, ids], penalties, counts)
        logits[where] = values

    def _draw(
        self,
        logits: torch.Tensor,
        plan: _Plan,
        filters: _Filters,
        sequences: list[Sequence],
        tokens: torch.Tensor,
        failed: torch.Tensor,
    ) -> None:
        """Replace the random rows' ``tokens`` [R] by draws, except those of ``failed`` [R] rows."""
        # The operator is not asked to bear NaN. On CUDA looking first would wait for the device.
        if logits.device.type != "cpu" or bool(failed.any()):
            logits.masked_fill_(failed.unsqueeze(1), 0.0)
        index = plan.random_index
        positions = [sequences[row].num_sampled_tokens for row in plan.random_rows]
        rows = logits if index is None else logits.index_select(0, index)
        drawn = ck.sample(rows, *filters, self._tensor(positions, torch.int64))
        if index is None:
            tokens.copy_(torch.where(failed, tokens, drawn))
        else:
            tokens[index] = torch.where(failed[index], tokens[index], drawn)

    def _index(self, rows: list[int], num_rows: int) -> torch.Tensor | None:
        return None if len(rows) == num_rows else self._tensor(rows, torch.int64)

    def _tensor_of(self, values: Floats) -> torch.Tensor:
        return self._device.upload(torch.from_numpy(np.ascontiguousarray(values)))

    def _tensor(self, values: list[int] | list[float] | list[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor:
        return self._device.upload(torch.tensor(values, dtype=dtype))


def _penalised(values: torch.Tensor, penalties: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Logits [n] of tokens that are ``counts`` [n] times in the output; penalties [3, n]: repetition, presence and
    frequency."""
    repetition, presence, frequency = penalties
    scaled = torch.where(values > 0, values / repetition, values * repetition)
    return scaled.sub(frequency * counts + presence * (counts > 0))
