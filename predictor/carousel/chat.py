"""``carousel generate``: a chat in the terminal, or one answer for a script, on an engine in this process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from carousel.config import Settings, raise_problems, read_settings
from carousel.engine.errors import CarouselError, GenerationFailed, RequestTooLong
from carousel.engine.request import FinishReason, GenerationRequest, Output, SamplingParams
from carousel.options import INTEGER, NUMBER, SWITCH, TEXT, help_text, option

if TYPE_CHECKING:
    from carousel.engine.engine import Engine

USAGE = """usage: carousel generate [PROMPT] [FLAG ...]

With a PROMPT, or text on standard input, answers it once on standard output. On a terminal without one, chats:
/reset forgets the conversation, /system TEXT sets the system prompt, /exit leaves. Ctrl-C stops the running answer,
twice leaves. Speed goes to standard error."""

_GROUP = "Generation"
_OWN = "the model's own"
_DEFAULT_TEMPERATURE = 0.7  # for models that recommend none; 1.0 makes small ones ramble
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How to answer. What is not given is as the model recommends."""

    system: str = option("", TEXT, "The system prompt.", group=_GROUP, empty="none", env=False)
    raw: bool = option(
        False, SWITCH, "Continue the prompt as it is, without the chat template.", group=_GROUP, env=False
    )
    max_tokens: int = option(
        0,
        INTEGER,
        "Longest answer.",
        unit="tokens",
        group=_GROUP,
        low=1,
        high=2**31 - 1,
        zero="until the model ends it or the context is full",
        env=False,
    )
    temperature: float | None = option(
        None,
        NUMBER,
        "0 takes the likeliest token always; higher is more varied.",
        group=_GROUP,
        low=0,
        high=100,
        empty=f"{_OWN}, else {_DEFAULT_TEMPERATURE}",
        env=False,
    )
    top_k: int | None = option(
        None,
        INTEGER,
        "Draw from so many of the likeliest tokens.",
        unit="tokens",
        group=_GROUP,
        low=1,
        high=2**31 - 1,
        zero="all",
        empty=_OWN,
        env=False,
    )
    top_p: float | None = option(
        None,
        NUMBER,
        "Draw from the likeliest tokens that together have this probability.",
        group=_GROUP,
        low=1e-9,
        high=1,
        empty=_OWN,
        env=False,
    )
    min_p: float | None = option(
        None,
        NUMBER,
        "Draw from tokens with at least this share of the likeliest one's probability.",
        group=_GROUP,
        low=0,
        high=1,
        empty=_OWN,
        env=False,
    )
    repetition_penalty: float | None = option(
        None,
        NUMBER,
        "Above 1 makes tokens that occurred less likely.",
        group=_GROUP,
        low=0.01,
        high=100,
        empty=_OWN,
        env=False,
    )
    presence_penalty: float | None = option(
        None,
        NUMBER,
        "Subtracted once from tokens that occurred.",
        group=_GROUP,
        low=-2,
        high=2,
        empty="none",
        env=False,
    )
    frequency_penalty: float | None = option(
        None, NUMBER, "Subtracted for each occurrence.", group=_GROUP, low=-2, high=2, empty="none", env=False
    )
    stop: str = option("", TEXT, "End the answer before this text.", group=_GROUP, empty="nothing", env=False)
    stats: bool = option(True, SWITCH, "Whether to print the speed.", group=_GROUP, env=False)


def chat_help() -> str:
    """The text of ``carousel generate --help``."""
    return f"{USAGE}\n\n{help_text([GenerateOptions, Settings])}"


@dataclass(slots=True)
class Answer:
    """What has come so far; still there when the answer is interrupted. Times in seconds (``perf_counter``)."""

    text: str = ""
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    finish_reason: FinishReason | None = None

    def add(self, output: Output) -> None:
        """Take a delta in.

        Raises:
            GenerationFailed: when the delta says that the engine failed.
        """
        if output.token_ids:
            self.last = time.perf_counter()
            if self.first is None:
                self.first = self.last
        self.tokens += len(output.token_ids)
        self.text += output.text
        self.finish_reason = output.finish_reason
        if output.finish_reason is FinishReason.ERROR:
            raise GenerationFailed(output.error or "the engine failed")

    def describe(self) -> str:
        """``"42 tokens, 61.3 tokens/s, first after 0.12 s"``; the speed is that of the tokens after the first."""
        parts = ["1 token" if self.tokens == 1 else f"{self.tokens} tokens"]
        if self.first is not None and self.last is not None:
            if self.tokens > 1 and self.last > self.first:
                parts.append(f"{(self.tokens - 1) / (self.last - self.first):.1f} tokens/s")
            parts.append(f"first after {self.first - self.started:.2f} s")
        if self.finish_reason is None:
            parts.append("interrupted")
        elif self.finish_reason not in (FinishReason.EOS, FinishReason.STOP):
            parts.append(f"ended by {self.finish_reason.value}")
        return ", ".join(parts)


def sampling_params(options: GenerateOptions, recommended: Mapping[str, Any]) -> SamplingParams:
    """The flags over what the model recommends over the engine's defaults."""
    values: dict[str, Any] = {"temperature": _DEFAULT_TEMPERATURE}
    for name in _SAMPLING:
        given = getattr(options, name)
        value = recommended.get(name) if given is None else given
        if value is not None:
            values[name] = value
    return SamplingParams(**values, max_tokens=options.max_tokens or None, stop=(options.stop,) if options.stop else ())


class Conversation:
    """The turns so far, and how they become a prompt."""

    def __init__(self, engine: Engine, options: GenerateOptions, out: TextIO) -> None:
        self.engine = engine
        self.options = options
        self.system = options.system
        self.raw = options.raw or not engine.tokenizer.has_chat_template
        self.turns: list[dict[str, str]] = []
        self._out = out

    def request(self, text: str) -> GenerationRequest:
        """The request for the next answer; ``text`` is what the user says now."""
        sampling = sampling_params(self.options, self.engine.generation_defaults)
        if self.raw:
            return GenerationRequest(prompt=text, sampling=sampling)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages += [*self.turns, {"role": "user", "content": text}]
        prompt = self.engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return GenerationRequest(prompt=prompt, sampling=sampling, add_special_tokens=False)

    async def answer(self, text: str, answer: Answer) -> None:
        """Stream the answer to the output and into ``answer``. Cancelling the task cancels the request.

        Raises:
            CarouselError: the request was refused, or the engine failed.
        """
        async with self.engine.submit(self.request(text)) as stream:
            async for output in stream:
                answer.add(output)
                self._out.write(output.text)
                self._out.flush()

    def remember(self, text: str, answer: Answer) -> None:
        """Add both sides of a turn, a broken-off answer included."""
        if not self.raw:
            self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer.text}]


def _show_stats(answer: Answer, options: GenerateOptions) -> None:
    if options.stats and answer.tokens:
        dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        print(f"{dim}[{answer.describe()}]{plain}", file=sys.stderr)


def _speak(conversation: Conversation, runner: asyncio.Runner, text: str) -> bool:
    """One turn. False when the user interrupted it.

    Raises:
        CarouselError: the request was refused, or the engine failed.
    """
    answer = Answer()
    completed = True
    try:
        # asyncio.Runner turns Ctrl-C into a cancellation of the answer, and then raises KeyboardInterrupt here.
        runner.run(conversation.answer(text, answer))
    except KeyboardInterrupt:
        completed = False
    finally:
        if answer.text and not answer.text.endswith("\n"):
            print(flush=True)
        _show_stats(answer, conversation.options)
    conversation.remember(text, answer)
    return completed


def _command(conversation: Conversation, line: str) -> bool:
    """Carry out a line that begins with a slash. False when the user wants to leave."""
    word, _, rest = line.partition(" ")
    if word in {"/exit", "/quit"}:
        return False
    if word == "/reset":
        conversation.turns.clear()
        print("The conversation is forgotten.", file=sys.stderr)
    elif word == "/system":
        if rest.strip():
            conversation.system = rest.strip()
        print(f"System prompt: {conversation.system or 'none'}", file=sys.stderr)
    else:
        print("/reset forgets the conversation, /system TEXT sets the system prompt, /exit leaves.", file=sys.stderr)
    return True


def _chat(conversation: Conversation, runner: asyncio.Runner) -> int:
    engine = conversation.engine
    print(
        f"{engine.model_name}, context of {engine.max_model_len:,} tokens. /help shows the commands.", file=sys.stderr
    )
    if conversation.raw and not conversation.options.raw:
        print("The model has no chat template: it continues each line as it is.", file=sys.stderr)
    interrupted = False
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            if interrupted:
                return _INTERRUPTED
            interrupted = True
            print("Ctrl-C again or /exit leaves.", file=sys.stderr)
            continue
        interrupted = False
        if not line:
            continue
        if line.startswith("/"):
            if not _command(conversation, line):
                return 0
            continue
        try:
            interrupted = not _speak(conversation, runner, line)
        except RequestTooLong as error:
            print(f"{error}. /reset starts anew.", file=sys.stderr)
        except GenerationFailed:
            raise
        except CarouselError as error:
            print(error, file=sys.stderr)


def _engines(settings: Settings) -> Callable[[Settings], Engine]:
    from carousel.standalone import engines

    return engines(settings)


def main(
    argv: Sequence[str],
    environ: Mapping[str, str],
    make_engines: Callable[[Settings], Callable[[Settings], Engine]] = _engines,
) -> int:
    """Run the command.

    Args:
        argv: the words after ``carousel generate``.
        environ: the environment.
        make_engines: loads the model of some settings and returns a function that starts an engine on it.

    Returns:
        the exit status: 0, or 130 when interrupted.

    Raises:
        SettingsError: before anything is loaded.
        CarouselError: a single prompt was refused, or the engine failed.
    """
    settings, parsed = read_settings(argv, environ, GenerateOptions, defaults=Settings(log_level="warning"))
    options = parsed.build(GenerateOptions)
    raise_problems(parsed)
    from carousel.telemetry.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    prompt = " ".join(parsed.positionals)
    if not prompt and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
        if not prompt:
            print("carousel generate: standard input is empty; give a prompt", file=sys.stderr)
            return 2
    engine = make_engines(settings)(settings)
    try:
        with asyncio.Runner() as runner:
            conversation = Conversation(engine, options, sys.stdout)
            if prompt:
                return 0 if _speak(conversation, runner, prompt) else _INTERRUPTED
            _enable_line_editing()
            return _chat(conversation, runner)
    finally:
        engine.stop()


def _enable_line_editing() -> None:
    """Arrow keys and history for ``input``, where Python has readline."""
    try:
        import readline  # noqa: F401  (importing it is what enables it)
    except ImportError:
        return
