"""The command line: commands, exit codes, the terminal chat."""

from __future__ import annotations

import builtins
import io
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.standalone_fakes import Factory, FakeEngine

from carousel import chat, cli, standalone
from carousel.chat import Answer, GenerateOptions, sampling_params
from carousel.config import Settings
from carousel.engine.errors import EngineUnavailable, GenerationFailed, QueueFull, RequestTooLong
from carousel.engine.request import FinishReason, Output
from carousel.models.fetch.errors import SourceError


class Terminal(io.StringIO):
    """Standard input that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carousel.telemetry.logs.configure_logging", lambda level, style: None)  # it is for good
    for name in list(os.environ):
        if name.startswith("CAROUSEL_"):
            monkeypatch.delenv(name)


class TestMain:
    def test_without_a_command_the_usage_is_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([]) == 2
        assert cli.main(["--help"]) == 0
        out = capsys.readouterr().out
        for command in cli.COMMANDS:
            assert re.search(rf"^  {command} ", out, re.MULTILINE)

    def test_an_unknown_command_is_guessed(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["server"]) == 2
        assert "did you mean serve?" in capsys.readouterr().err
        assert cli.main(["xyzzy"]) == 2
        assert "there are serve, generate" in capsys.readouterr().err

    @pytest.mark.parametrize("word", ["version", "--version"])
    def test_version(self, word: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([word]) == 0
        assert re.fullmatch(r"carousel (\d+\.\d+\S*|unknown)\n", capsys.readouterr().out)

    @pytest.mark.parametrize("command", ["serve", "generate", "bench", "pull"])
    def test_each_command_has_help_with_its_flags(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([command, "--http-port=wrong", "--help"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"usage: carousel {command}")
        assert "--cache-dir" in out
        assert ("--max-batch-sequences" in out) == (command != "pull")

    @pytest.mark.parametrize("command", ["serve", "generate", "bench", "pull"])
    def test_wrong_flags_are_told_all_at_once(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([command, "--http-prot=1", "--dtype=fp8"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"carousel {command}: 2 problems with the settings:")
        assert "--http-port" in err
        assert "--dtype / CAROUSEL_DTYPE" in err

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (SourceError("hf://a/b", "there is no network", "Try later."), 1),
            (EngineUnavailable("no device"), 1),
            (BrokenPipeError(), 1),
            (KeyboardInterrupt(), 130),
        ],
    )
    def test_expected_errors_are_one_line(
        self, error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def fail(*arguments: object) -> int:
            raise error

        monkeypatch.setitem(cli.COMMANDS, "pull", fail)
        kept = os.dup(1)
        try:
            assert cli.main(["pull"]) == code
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        err = capfd.readouterr().err
        assert "Traceback" not in err
        assert err == (f"carousel pull: {error}\n" if str(error) else "")

    def test_bugs_keep_their_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(cli.COMMANDS, "pull", lambda *arguments: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            cli.main(["pull"])

    def test_help_imports_nothing_heavy(self) -> None:
        code = (
            "import sys; from carousel.cli import main; main(['--help']); main(['serve', '--help']);"
            "heavy = {'torch', 'kserve', 'numpy', 'rich', 'aiohttp', 'asyncio'};"
            "print('heavy:', heavy & set(sys.modules))"
        )
        environment = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert run.stdout.endswith("heavy: set()\n")


class TestServe:
    def test_the_server_gets_the_settings_and_gives_the_exit_code(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[Settings] = []
        server = types.ModuleType("carousel.server")
        server.serve = lambda settings: given.append(settings) or 3
        monkeypatch.setitem(sys.modules, "carousel.server", server)
        monkeypatch.setenv("CAROUSEL_GRPC", "false")
        assert cli.main(["serve", "--http_port", "9000"]) == 3
        assert given == [replace(Settings(), http_port=9000, grpc=False)]


class TestPull:
    @pytest.fixture
    def resolved(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def resolve(uri: str, *, cache_dir: str | None = None, checksum: str | None = None) -> Path:
            calls.append((uri, cache_dir, checksum))
            return Path("/somewhere/model.gguf")

        monkeypatch.setattr("carousel.models.source.resolve", resolve)
        return calls

    def test_the_path_is_all_that_is_printed(
        self, resolved: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["pull", "hf://a/b", "--cache-dir", "/c"]) == 0
        assert capsys.readouterr().out == "/somewhere/model.gguf\n"
        assert cli.main(["pull", "--model", "hf://c/d", "--model-checksum", "a" * 64]) == 0
        assert cli.main(["pull"]) == 0
        assert resolved == [("hf://a/b", "/c", None), ("hf://c/d", None, "a" * 64), (Settings().model, None, None)]

    def test_two_uris_are_refused(self, resolved: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["pull", "hf://a/b", "hf://c/d"]) == 2
        assert "'hf://c/d': unexpected word" in capsys.readouterr().err
        assert resolved == []


class TestStandalone:
    def test_the_model_is_loaded_once_with_the_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loads: list[tuple[Any, ...]] = []
        started: list[tuple[Any, Settings]] = []

        def load_model(path: Path, **how: Any) -> str:
            loads.append((path, how))
            return "the model"

        class Engine:
            def __init__(self, model: str, settings: Settings) -> None:
                self.what = (model, settings)

            def start(self) -> None:
                started.append(self.what)

        monkeypatch.setattr("carousel.models.source.resolve", lambda uri, **how: Path(uri))
        monkeypatch.setattr("carousel.models.loader.load_model", load_model)
        monkeypatch.setattr("carousel.engine.engine.Engine", Engine)
        settings = Settings(
            model="/x", device="cpu", dtype="bfloat16", max_model_len=77, quantization="none", cache_dir="/c"
        )
        start = standalone.engines(settings)
        for batching in ("static", "continuous"):
            start(replace(settings, batching=batching))
        how = {
            "device": "cpu", "dtype": "bfloat16", "max_model_len": 77, "quantization": "none", "cache_dir": "/c",
            "deterministic": False, "kv_dtype": "auto", "ranks": None,
        }  # fmt: skip
        assert loads == [(Path("/x"), how)]
        assert [(model, each.batching) for model, each in started] == [
            ("the model", "static"),
            ("the model", "continuous"),
        ]

    @pytest.mark.parametrize(("there", "asked", "device"), [(True, "auto", "cuda"), (False, "auto", "cpu"),
                                                            (True, "cpu", "cpu"), (True, "cuda", "cuda")])  # fmt: skip
    def test_the_device_is_chosen(self, there: bool, asked: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: there)
        assert standalone.pick_device(asked) == device

    def test_a_device_that_is_not_there_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(EngineUnavailable, match="--device cuda"):
            standalone.pick_device("cuda")

    def test_one_of_several_gpus_is_chosen_by_its_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda index: f"slice {index}")
        assert standalone.pick_device("cuda:1") == "cuda:1"
        with pytest.raises(EngineUnavailable, match=r"--device cuda:2: torch finds only cuda:0 \(slice 0\), cuda:1"):
            standalone.pick_device("cuda:2")


class TestAnswer:
    def test_speed_and_the_end_are_described(self) -> None:
        answer = Answer()
        answer.started, answer.first, answer.last, answer.tokens = 10.0, 10.5, 12.5, 5
        assert answer.describe() == "5 tokens, 2.0 tokens/s, first after 0.50 s, interrupted"
        answer.finish_reason = FinishReason.EOS
        assert answer.describe() == "5 tokens, 2.0 tokens/s, first after 0.50 s"
        answer.finish_reason, answer.tokens = FinishReason.LENGTH, 1
        assert answer.describe() == "1 token, first after 0.50 s, ended by length"

    def test_deltas_are_joined_and_errors_raised(self) -> None:
        answer = Answer()
        answer.add(Output("r", text="a", token_ids=[1]))
        answer.add(Output("r", text="b", token_ids=[2, 3]))
        assert (answer.text, answer.tokens) == ("ab", 3)
        with pytest.raises(GenerationFailed, match="broken"):
            answer.add(Output("r", finish_reason=FinishReason.ERROR, error="broken"))


class TestSampling:
    def test_flags_beat_the_models_recommendation_beats_the_default(self) -> None:
        recommended = {"top_p": 0.5, "temperature": 0.2, "max_new_tokens": 3}
        params = sampling_params(GenerateOptions(temperature=0.0, stop="END", max_tokens=9), recommended)
        assert (params.temperature, params.top_p, params.stop, params.max_tokens) == (0.0, 0.5, ("END",), 9)
        params = sampling_params(GenerateOptions(), {})
        assert (params.temperature, params.top_p, params.stop, params.max_tokens) == (0.7, 1.0, (), None)


def run_generate(*argv: str, factory: Factory) -> int:
    return chat.main(argv, {}, factory)


class TestOneShot:
    def test_the_answer_is_on_standard_output_and_the_speed_on_standard_error(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        factory = Factory()
        assert run_generate("Say", "it.", "--max-tokens", "3", "--system=Be brief.", factory=factory) == 0
        out, err = capsys.readouterr()
        assert out == "w0 w1 w2 \n"
        assert re.fullmatch(r"\[3 tokens, [\d.]+ tokens/s, first after [\d.]+ s, ended by length\]\n", err)
        (engine,) = factory.engines
        (request,) = engine.requests
        assert request.prompt == "<system>Be brief.<user>Say it.<assistant>"
        assert request.add_special_tokens is False
        assert (request.sampling.temperature, request.sampling.top_p, request.sampling.max_tokens) == (0.25, 0.5, 3)
        assert engine.stopped

    def test_raw_prompts_go_without_template(self, capsys: pytest.CaptureFixture[str]) -> None:
        factory = Factory()
        run_generate("Once", "--raw", "--no-stats", factory=factory)
        assert factory.engines[0].requests[0].prompt == "Once"
        assert factory.engines[0].requests[0].add_special_tokens is True
        assert capsys.readouterr().err == ""

    def test_a_prompt_from_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
        factory = Factory()
        assert run_generate("--raw", factory=factory) == 0
        assert factory.engines[0].requests[0].prompt == "from a pipe"

    def test_empty_standard_input_is_refused_before_anything_is_loaded(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
        factory = Factory()
        assert run_generate(factory=factory) == 2
        assert "standard input is empty" in capsys.readouterr().err
        assert factory.loads == 0

    def test_a_refused_prompt_is_an_error_and_the_engine_is_stopped(self) -> None:
        factory = Factory(lambda engine: setattr(engine, "refuse", RequestTooLong("prompt", "9 tokens", "at most 8")))
        with pytest.raises(RequestTooLong):
            run_generate("long", factory=factory)
        assert factory.engines[0].stopped

    def test_an_interrupt_cancels_the_answer_and_keeps_what_came(
        self, capsys: pytest.CaptureFixture[str], interrupting: Callable[[FakeEngine], None]
    ) -> None:
        factory = Factory(interrupting)
        assert run_generate("x", "--max-tokens=1000", factory=factory) == 130
        out, err = capsys.readouterr()
        assert out.startswith("w0 w1 ")
        assert out.endswith("\n")
        assert "interrupted" in err
        (engine,) = factory.engines
        assert engine.cancelled == [engine.requests[0].request_id]
        assert engine.stopped


@pytest.fixture
def interrupting() -> Iterator[Callable[[FakeEngine], None]]:
    """Makes an engine press Ctrl-C, for real, at the third step of its first answer. A shell starts what it puts into
    the background with Ctrl-C ignored: not so here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def prepare(engine: FakeEngine) -> None:
        steps = 0

        class Interrupter:
            def on_step(self, step: object, latencies: object) -> None:
                nonlocal steps
                steps += 1
                if steps == 3:
                    os.kill(os.getpid(), signal.SIGINT)

            def on_finish(self, request: object) -> None:
                pass

        engine.timeline.observers.append(Interrupter())

    yield prepare
    signal.signal(signal.SIGINT, before)


class TestChat:
    @pytest.fixture
    def talk(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, FakeEngine]]:
        """Type lines into the chat (an exception is raised at the prompt instead) and get the exit code."""

        def start(*lines: str | BaseException, flags: tuple[str, ...] = (), factory: Factory | None = None) -> Any:
            typed = iter(lines)

            def read_line(prompt: str) -> str:
                line = next(typed, EOFError())
                if isinstance(line, BaseException):
                    raise line
                return line

            monkeypatch.setattr("sys.stdin", Terminal())
            monkeypatch.setattr(builtins, "input", read_line)
            factory = factory or Factory()
            code = run_generate("--max-tokens=2", *flags, factory=factory)
            assert factory.engines[0].stopped
            assert next(typed, None) is None, "not all that was typed was read"
            return code, factory.engines[0]

        return start

    def prompts(self, engine: FakeEngine) -> list[Any]:
        return [request.prompt for request in engine.requests]

    def test_the_conversation_is_remembered_until_reset(
        self, talk: Callable[..., tuple[int, FakeEngine]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, engine = talk("one", "", "two", "/reset", "three", "/exit")
        assert code == 0
        assert self.prompts(engine) == [
            "<user>one<assistant>",
            "<user>one<assistant>w0 w1 <user>two<assistant>",
            "<user>three<assistant>",
        ]
        out, err = capsys.readouterr()
        assert out == "w0 w1 \n" * 3
        assert "fake, context of 4,096 tokens" in err

    def test_the_system_prompt_can_be_set_and_shown(
        self, talk: Callable[..., tuple[int, FakeEngine]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        _, engine = talk("/system", "/system Be kind.", "hello", "/what", "/quit")
        assert self.prompts(engine) == ["<system>Be kind.<user>hello<assistant>"]
        err = capsys.readouterr().err
        assert "System prompt: none" in err
        assert "System prompt: Be kind." in err
        assert "/reset forgets" in err

    def test_a_model_without_template_continues_lines(
        self, talk: Callable[..., tuple[int, FakeEngine]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        factory = Factory(lambda engine: setattr(engine.tokenizer, "has_chat_template", False))
        _, engine = talk("one", "two", factory=factory)
        assert self.prompts(engine) == ["one", "two"]
        assert "no chat template" in capsys.readouterr().err

    def test_an_interrupt_at_the_prompt_leaves_only_the_second_time(
        self, talk: Callable[..., tuple[int, FakeEngine]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, engine = talk(KeyboardInterrupt(), "hello", KeyboardInterrupt(), KeyboardInterrupt())
        assert code == 130
        assert len(engine.requests) == 1
        assert capsys.readouterr().err.count("Ctrl-C again or /exit leaves.") == 2

    def test_an_interrupt_of_an_answer_stops_it_and_the_next_one_leaves(
        self,
        talk: Callable[..., tuple[int, FakeEngine]],
        interrupting: Callable[[FakeEngine], None],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        flags = ("--max-tokens=1000",)
        code, engine = talk("long", KeyboardInterrupt(), flags=flags, factory=Factory(interrupting))
        assert code == 130
        assert len(engine.cancelled) == 1

        def short(engine: FakeEngine) -> None:
            interrupting(engine)
            engine.short_by = 995

        code, engine = talk("long", "more", flags=flags, factory=Factory(short))
        assert code == 0
        _, second = self.prompts(engine)
        assert second.startswith("<user>long<assistant>w0 w1 ")
        assert second.endswith("<user>more<assistant>")
        assert "interrupted" in capsys.readouterr().err

    def test_a_conversation_that_no_longer_fits_can_be_reset(
        self, talk: Callable[..., tuple[int, FakeEngine]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        refusal = RequestTooLong("prompt", "9000 tokens", "at most 4095")
        _, engine = talk("x", factory=Factory(lambda engine: setattr(engine, "refuse", refusal)))
        assert self.prompts(engine) == []
        assert "at most 4095. /reset starts anew." in capsys.readouterr().err

    def test_other_refusals_are_shown_and_a_dead_engine_ends_it(
        self, talk: Callable[..., tuple[int, FakeEngine]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        talk("x", factory=Factory(lambda engine: setattr(engine, "refuse", QueueFull("it is full", 1))))
        assert "it is full" in capsys.readouterr().err
        with pytest.raises(GenerationFailed, match="on fire"):
            talk("x", factory=Factory(lambda engine: setattr(engine, "fail", "on fire")))


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_sleep_unless_told_otherwise(given: str | None, policy: str) -> None:
    code = "import sys; from carousel import cli; cli.COMMANDS['version'] = lambda *_: 0; cli.main(['version'])"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": given} if given else {})
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules; import torch"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(rf"OMP_WAIT_POLICY\s*=\s*'{policy}'", done.stderr), done.stderr
