"""The steps that take most memory, run before the KV pool takes the rest."""

from __future__ import annotations

import torch

from carousel.engine.block_pool import blocks_for
from carousel.engine.device import Device
from carousel.engine.request import MAX_LOGPROBS, GenerationRequest, SamplingParams, Sequence
from carousel.engine.runner import DecoderLike, DecoderRunner, Followers
from carousel.engine.sampler import Sampler, SequenceSampler
from carousel.engine.scheduler import Schedule, ScheduledSequence


def worst_step(
    decoder: DecoderLike,
    vocab_size: int,
    device: Device,
    num_tokens: int,
    num_rows: int,
    followers: Followers | None = None,
) -> None:
    """Run the largest of steps, on a KV pool that just holds it.

    A prompt of ``num_tokens`` whose request wants the log-probabilities of every token, so that all rows have logits;
    then ``num_rows`` rows are sampled with everything that takes memory: filters, penalties, log-probabilities.
    """
    params = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)
    sampler = Sampler(vocab_size, device)
    runner = DecoderRunner(decoder, blocks_for(num_tokens), 1, num_tokens, device=device, followers=followers)
    prompt = [token % vocab_size for token in range(num_tokens)]
    longest = _sequence(prompt, params, vocab_size)
    longest.block_table = list(range(blocks_for(num_tokens)))
    result = runner.run(Schedule([ScheduledSequence(longest, 0, num_tokens)], num_prefill_tokens=num_tokens))
    rows = [_sequence(prompt[:1], params, vocab_size) for _ in range(num_rows)]
    for chunk in result.prompts:
        sampler.launch_prompt(chunk.logits[:-1], prompt[1:], MAX_LOGPROBS).wait()
    logits = torch.zeros(num_rows, vocab_size, device=decoder.device)
    sampler.launch(logits, rows).wait()


def _sequence(prompt: list[int], params: SamplingParams, vocab_size: int) -> Sequence:
    state = SequenceSampler(params, seed=0, index=0, prompt_ids=prompt, eos_ids=frozenset(), vocab_size=vocab_size)
    return Sequence(
        request=GenerationRequest(prompt=prompt, sampling=params),
        index=0,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        max_total_tokens=len(prompt) + 1,
        order=0,
        detokenizer=None,  # type: ignore[arg-type]  # no text is made
        sampler=state,
        eos_ids=frozenset(),
    )
