"""``carousel COMMAND``, see ``USAGE``. Each command imports only what it needs, when it is run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

USAGE = """usage: carousel COMMAND [FLAG ...]

commands:
  serve          serve a model over KServe V1 and V2, gRPC and OpenAI's API
  generate       chat with a model in the terminal, or answer one prompt
  bench          measure throughput and latencies, in this process or of a server
  report         turn what bench and load tests wrote into a page, Markdown and pictures
  pull           fetch a model into the cache and print where it is
  usage          show what each tenant used and what it costs
  doctor         say what limits a server and which setting to change
  scaler         tell KEDA how many replicas the queues take, and wake them from zero
  autoscale-sim  replay arrivals against a modelled autoscaler and compare signals
  version        print the version

`carousel COMMAND --help` lists the flags of a command. Every setting is a flag, a variable CAROUSEL_* and a line of
that help, with its unit, default and bounds; a flag beats the variable, which beats the default."""

SERVE_USAGE = """usage: carousel serve [--model URI] [--model-name NAME] [--host H] [--http-port N] [--grpc-port N] ...

Serves a model until SIGTERM, which drains it. Ready when /v2/models/NAME/ready answers 200. Flags may also be written
with underscores, as KServe writes them: --model_name, --http_port. A later flag beats an earlier one."""

PULL_USAGE = """usage: carousel pull [URI] [--cache-dir DIR] [--model-checksum SHA256]

Fetches a model into the cache, unless it is there, and prints its path. Without a URI: the model that `carousel serve`
would serve."""

_FAILED, _MISUSED, _INTERRUPTED = 1, 2, 130
_EXPECTED = (
    ("carousel.models.fetch.errors", "SourceError"),
    ("carousel.models.families", "UnsupportedModel"),
    ("carousel.models.weights", "ModelLoadError"),
)
_HELP = {"-h", "--help"}


def _wants_help(argv: Sequence[str]) -> bool:
    words = list(argv)
    return any(word in _HELP for word in (words[: words.index("--")] if "--" in words else words))


def _configure_logging(level: str, style: str) -> None:
    from carousel.telemetry.logs import configure_logging

    configure_logging(level, style)


def serve(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the server until it is told to stop."""
    from carousel.config import load_settings, settings_help

    if _wants_help(argv):
        print(f"{SERVE_USAGE}\n\n{settings_help()}")
        return 0
    settings = load_settings(argv, environ)
    from carousel.server import serve as run_server

    return run_server(settings)


def pull(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Fetch a model and print its path on standard output."""
    from carousel.config import Settings, raise_problems, read_settings
    from carousel.options import help_text

    if _wants_help(argv):
        print(f"{PULL_USAGE}\n\n{help_text([Settings], only=('model', 'model_checksum', 'cache_dir', 'log_level'))}")
        return 0
    words = list(argv)
    if words and not words[0].startswith("-"):
        words[:1] = ["--model", words[0]]
    settings, parsed = read_settings(words, environ)
    for word in parsed.positionals:
        parsed.fail((), f"{word!r}: unexpected word; pull takes one URI, before its flags")
    raise_problems(parsed)
    _configure_logging(settings.log_level, settings.log_format)
    from carousel.models.source import resolve

    print(resolve(settings.model, cache_dir=settings.cache_dir or None, checksum=settings.model_checksum or None))
    return 0


def generate(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Chat in the terminal, or answer one prompt."""
    from carousel import chat

    if _wants_help(argv):
        print(chat.chat_help())
        return 0
    return chat.main(argv, environ)


def bench(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Measure."""
    from carousel.bench import command

    if _wants_help(argv):
        print(command.bench_help())
        return 0
    from carousel.standalone import engines

    return command.main(argv, environ, engines)


def report(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Show what was measured."""
    from carousel.report import command

    if _wants_help(argv):
        print(command.report_help())
        return 0
    return command.main(argv)


def scaler(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Serve KEDA."""
    if _wants_help(argv):
        from carousel.cluster.scaler_options import scaler_help

        print(scaler_help())
        return 0
    from carousel.cluster.scaler import main as run_scaler

    return run_scaler(argv, environ)


def autoscale_sim(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Compare scaling signals."""
    from carousel.cluster.simulate_command import main as compare
    from carousel.cluster.simulate_command import simulate_help

    if _wants_help(argv):
        print(simulate_help())
        return 0
    return compare(argv, environ)


def usage(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Show who used what."""
    from carousel import usage_command

    if _wants_help(argv):
        print(usage_command.usage_help())
        return 0
    return usage_command.main(argv, environ)


def doctor(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Say what limits a server."""
    from carousel import doctor_command

    if _wants_help(argv):
        print(doctor_command.doctor_help())
        return 0
    return doctor_command.main(argv, environ)


def version_text() -> str:
    """The version of this distribution, or ``unknown`` when it runs from a source tree that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("kserve-carousel")
    except metadata.PackageNotFoundError:
        return "unknown"


def version(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the version."""
    print(f"carousel {version_text()}")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str], Mapping[str, str]], int]] = {
    "serve": serve,
    "generate": generate,
    "bench": bench,
    "report": report,
    "pull": pull,
    "scaler": scaler,
    "autoscale-sim": autoscale_sim,
    "usage": usage,
    "doctor": doctor,
    "version": version,
}


def _expected(error: Exception) -> bool:
    """Errors whose message says all; everything else is a bug and keeps its traceback."""
    from carousel.engine.errors import CarouselError

    kinds: list[type[BaseException]] = [CarouselError]
    # Only what was imported can have been raised: an error must not cost an import of the model code.
    for module, name in _EXPECTED:
        if module in sys.modules:
            kinds.append(getattr(sys.modules[module], name))
    return isinstance(error, tuple(kinds))


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point.

    Returns:
        0; 1 when the command failed; 2 when it was called wrongly; 130 when it was interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in _HELP | {"help"}:
        print(USAGE)
        return 0 if words else _MISUSED
    if words[0] == "--version":
        words[0] = "version"
    name = words[0]
    if name not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        print(f"carousel: no command {name!r}; {hint}", file=sys.stderr)
        return _MISUSED
    from carousel.cpus import let_idle_threads_sleep
    from carousel.options import SettingsError

    let_idle_threads_sleep()
    try:
        return COMMANDS[name](words[1:], os.environ)
    except SettingsError as error:
        print(f"carousel {name}: {error}", file=sys.stderr)
        return _MISUSED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output is gone; Python must not complain about it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except Exception as error:
        if not _expected(error):
            raise
        print(f"carousel {name}: {error}", file=sys.stderr)
        return _FAILED


if __name__ == "__main__":
    sys.exit(main())
