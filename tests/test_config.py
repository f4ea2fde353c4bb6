"""Settings: declared once, read from anywhere, refused all together with messages that help."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carousel import config
from carousel.config import Settings, SettingsError, declared_settings, load_settings, settings_help, settings_table
from carousel.cpus import available_cpus, cgroup_cpu_quota
from carousel.options import INTEGER, NUMBER, SIZE, Option, format_size, parse_size

SETTINGS = {item.name: item for item in declared_settings()}
NUMERIC = [item for item in SETTINGS.values() if item.kind in (INTEGER, NUMBER, SIZE)]
CHOSEN = [item for item in SETTINGS.values() if item.choices]


def name_of(item: Option) -> str:
    return item.name


def problems(*argv: str, **environ: str) -> list[str]:
    """The messages that a command line and an environment are refused with."""
    with pytest.raises(SettingsError) as refused:
        load_settings(argv, environ)
    return [problem.message for problem in refused.value.problems]


class TestDeclarations:
    def test_every_field_is_a_setting_but_the_notices(self) -> None:
        assert {field.name for field in fields(Settings)} - set(SETTINGS) == {"notices"}

    @pytest.mark.parametrize("item", SETTINGS.values(), ids=name_of)
    def test_each_says_all_about_itself(self, item: Option) -> None:
        assert item.flag == "--" + item.name.replace("_", "-")
        assert item.env == "CAROUSEL_" + item.name.upper()
        assert item.help.endswith(".")
        assert item.group
        assert item.allowed
        assert item.shown_default

    @pytest.mark.parametrize("item", NUMERIC, ids=name_of)
    def test_numbers_have_bounds_and_a_unit(self, item: Option) -> None:
        assert item.low is not None
        assert item.high is not None
        assert item.unit or item.name in {"http_port", "grpc_port", "seed"}

    def test_flags_variables_and_aliases_are_unique(self) -> None:
        flags = [flag for item in SETTINGS.values() for flag in (item.flag, *item.aliases)]
        flags += [item.flag for item in config.COMPATIBILITY]
        assert len(flags) == len(set(flags))

    @pytest.mark.parametrize("item", SETTINGS.values(), ids=name_of)
    def test_defaults_are_within_their_own_bounds(self, item: Option) -> None:
        assert item.accepts(item.default)
        assert load_settings(environ={}) == Settings()

    def test_help_and_table_show_every_setting(self) -> None:
        text, table = settings_help(), settings_table()
        for item in SETTINGS.values():
            entry = re.search(rf"^  {item.flag}\b.*?(?=^  --|\Z)", text, re.MULTILINE | re.DOTALL)
            assert entry, item.flag
            words = " ".join(entry[0].split())
            assert item.env in words
            assert f"Default: {item.shown_default}" in words
            assert item.unit in words
            row = next(line for line in table.splitlines() if line.startswith(f"| `{item.flag}`"))
            assert item.env in row
            assert len(re.findall(r"(?<!\\)\|", row)) == 7

    def test_reading_settings_imports_nothing_heavy(self) -> None:
        code = "import sys, carousel.config; print(sorted({'torch', 'kserve', 'numpy', 'rich'} & set(sys.modules)))"
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
        )
        assert run.stdout.strip() == "[]"


def environment() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}


class TestBounds:
    @pytest.mark.parametrize("item", NUMERIC, ids=name_of)
    def test_both_ends_are_in_and_what_lies_beyond_is_out(self, item: Option) -> None:
        assert item.low is not None
        assert item.high is not None
        as_text = repr if item.kind is NUMBER else str
        step = 1e-9 * item.high if item.kind is NUMBER else 1
        assert item.read(as_text(item.low)) == item.low
        assert item.read(as_text(item.high)) == item.high
        with pytest.raises(ValueError, match=re.escape(item.allowed)):
            item.read(as_text(item.high + step))
        below = item.low - step if item.low - step != 0 or not item.zero else -1
        with pytest.raises(ValueError, match=re.escape(item.allowed)):
            item.read(as_text(below))

    @given(data=st.data())
    def test_any_whole_number_is_read_exactly_or_refused(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from([item for item in NUMERIC if item.kind is INTEGER]))
        assert item.low is not None
        assert item.high is not None
        number = data.draw(st.integers(-5, 70_000) | st.integers(-(2**70), 2**70))
        allowed = item.low <= number <= item.high or (number == 0 and bool(item.zero))
        try:
            assert item.read(str(number)) == number
            assert allowed
        except ValueError:
            assert not allowed

    @pytest.mark.parametrize("item", CHOSEN, ids=name_of)
    def test_choices_are_closed(self, item: Option) -> None:
        assert [item.read(choice) for choice in item.choices] == list(item.choices)
        with pytest.raises(ValueError, match=" or "):
            item.read("other")

    @pytest.mark.parametrize("item", [*NUMERIC, *CHOSEN], ids=name_of)
    def test_messages_name_flag_variable_value_and_bounds(self, item: Option) -> None:
        by_flag, by_env = problems(item.flag, "bad!"), problems(**{item.env: "bad!"})
        for (message,) in (by_flag, by_env):
            assert message.startswith(f"{item.flag} / {item.env}: got 'bad!'")
            assert f"allowed: {item.allowed}" in message
        assert f"({item.env} in the environment)" in by_env[0]

    @pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "", " ", "0x10", "1,5"])
    def test_odd_numbers_are_refused(self, text: str) -> None:
        for name in ("target_step_ms", "drain_seconds", "http_port"):
            with pytest.raises(ValueError, match="to"):
                SETTINGS[name].read(text)


class TestReading:
    def test_a_flag_beats_the_variable_beats_the_default(self) -> None:
        environ = {"CAROUSEL_MAX_BATCH_SEQUENCES": "7", "CAROUSEL_POLICY": "fair"}
        settings = load_settings(["--max-batch-sequences", "9"], environ)
        assert (settings.max_batch_sequences, settings.policy, settings.batching) == (9, "fair", "continuous")

    def test_a_good_flag_covers_a_bad_variable(self) -> None:
        assert load_settings(["--threads", "3"], {"CAROUSEL_THREADS": "many"}).threads == 3

    def test_the_last_flag_wins_because_kserve_concatenates_arguments(self) -> None:
        argv = ["--http_port=9000", "--grpc", "--http-port", "9001", "--enable_grpc", "false"]
        settings = load_settings(argv, {})
        assert (settings.http_port, settings.grpc) == (9001, False)

    def test_kserve_spellings(self) -> None:
        argv = ["--model_name", "iris", "--model_dir", "/tmp", "--http_port", "9000", "--workers", "1"]
        settings = load_settings(argv, {})
        assert (settings.model_name, settings.model, settings.http_port) == ("iris", "/tmp", 9000)
        assert load_settings(["--model_id=hf://a/b"], {}).model == "hf://a/b"
        assert load_settings(["--max_model_len=100", "--max-num-seqs=4"], {}).max_model_len == 100

    @pytest.mark.parametrize(
        ("words", "value"),
        [
            (["--prefix-caching"], True),
            (["--no-prefix-caching"], False),
            (["--prefix-caching=off"], False),
            (["--prefix_caching", "False"], False),
            (["--no-prefix-caching", "--prefix-caching", "yes"], True),
        ],
    )
    def test_switches(self, words: list[str], value: bool) -> None:
        assert load_settings(words, {"CAROUSEL_PREFIX_CACHING": str(not value)}).prefix_caching is value

    def test_negated_switches_take_no_value(self) -> None:
        assert problems("--no-grpc=true") == ["--no-grpc: takes no value, got 'true'"]

    def test_workers_other_than_one_are_refused_with_the_reason(self) -> None:
        (message,) = problems("--workers=2")
        assert "got '2', allowed: 1, because one process owns the model" in message
        assert "replicas" in message

    @pytest.mark.parametrize(
        "words",
        [["--max_threads", "4"], ["--configure_logging=False"], ["--enable_latency_logging"], ["--protocol", "v2"]],
    )
    def test_other_kserve_flags_are_taken_with_a_notice(self, words: list[str]) -> None:
        settings = load_settings([*words, "--http_port", "9000"], {})
        assert settings.http_port == 9000
        (notice,) = settings.notices
        assert notice.startswith(words[0].partition("=")[0])
        assert "is ignored" in notice

    def test_tls_flags_of_kserve_are_taken_and_half_of_them_is_refused(self, tmp_path: Path) -> None:
        for name in ("c.pem", "k.pem"):
            (tmp_path / name).touch()
        words = ["--ssl_certfile", str(tmp_path / "c.pem"), f"--ssl_keyfile={tmp_path / 'k.pem'}"]
        settings = load_settings(words, {})
        assert (settings.tls_certificate, settings.tls_key) == (str(tmp_path / "c.pem"), str(tmp_path / "k.pem"))
        (message,) = problems(*words[:2])
        assert message == "--tls-certificate without --tls-key: TLS needs both"
        (message,) = problems("--tls-client-ca", str(tmp_path / "c.pem"))
        assert "TLS is off" in message

    @pytest.mark.parametrize("flag", ["--api-keys", "--tls-client-ca"])
    def test_files_that_are_not_there_are_named(self, flag: str) -> None:
        assert any(f"{flag} / CAROUSEL_" in line and "'/nowhere/x'" in line for line in problems(flag, "/nowhere/x"))

    def test_service_links_of_kubernetes_are_no_settings(self) -> None:
        links = {
            "CAROUSEL_SERVICE_HOST": "10.0.0.1",
            "CAROUSEL_SERVICE_PORT": "80",
            "CAROUSEL_SERVICE_PORT_HTTP": "80",
            "CAROUSEL_PORT": "tcp://10.0.0.1:80",
            "CAROUSEL_PORT_80_TCP": "tcp://10.0.0.1:80",
            "CAROUSEL_PORT_80_TCP_ADDR": "10.0.0.1",
            "CAROUSEL_HTTP_PORT": "tcp://10.0.0.1:80",
        }
        settings = load_settings([], links)
        assert settings == Settings()
        assert [notice for notice in settings.notices if "CAROUSEL_HTTP_PORT" in notice]

    def test_a_size_a_weight_list_and_nothing(self) -> None:
        argv = [
            "--kv-cache-memory",
            "1.5GiB",
            "--policy",
            "fair",
            "--tenant-weights",
            "gold=4, free=0.5",
            "--seed=none",
        ]
        settings = load_settings(argv, {})
        assert settings.kv_cache_bytes == 1.5 * 2**30
        assert settings.kv_cache_fraction is None
        assert settings.tenant_weights == {"gold": 4.0, "free": 0.5}
        assert settings.seed is None
        assert load_settings(["--seed", "3"], {}).seed == 3

    def test_what_was_changed_is_known(self) -> None:
        assert Settings().changed() == {}
        settings = load_settings(["--no-grpc", "--max-request-bytes", "2MiB"], {})
        assert settings.changed() == {"grpc": "off", "max_request_bytes": "2MiB"}


class TestProblems:
    def test_all_are_told_at_once(self) -> None:
        messages = problems(
            "--http-port=0", "--dtype", "fp8", "--grpc-por", "5", "--tenant-weights", "a", "extra", "--model",
            CAROUSEL_MAX_BATCH_TOKEN="3", CAROUSEL_SEED="-1", CAROUSEL_MAX_QUEUE_REQUESTS="0",
        )  # fmt: skip
        expected = ("MAX_BATCH_TOKEN:", "--seed", "--max-queue-requests", "--http-port", "--dtype", "--grpc-por:",
                    "--tenant-weights", "'extra'", "--model: needs a value")  # fmt: skip
        for word in expected:
            assert sum(word in message for message in messages) == 1, word
        assert len(messages) == len(expected)

    def test_the_error_counts_and_lists(self) -> None:
        with pytest.raises(SettingsError, match=r"^2 problems with the settings:\n  - .*\n  - ") as refused:
            load_settings(["--a-b-c", "--http-port=x"], {})
        assert len(refused.value.problems) == 2
        assert str(SettingsError(refused.value.problems[:1])).startswith("1 problem with")

    def test_abbreviations_are_off_and_typing_errors_are_guessed(self) -> None:
        assert "did you mean --max-batch-tokens" in problems("--max-batch-token", "5")[0]
        assert "no such flag" in problems("--http", "9000")[0]
        assert "did you mean CAROUSEL_DEVICE" in problems(CAROUSEL_DEVISE="cpu")[0]
        assert problems("--zzzzz")[0].endswith("(see --help)")

    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            ("--max-batch-tokens 8 --max-batch-sequences 9", ("--max-batch-sequences (9)", "--max-batch-tokens (8)")),
            ("--max-batch-tokens 8", ("--max-batch-sequences (64)", "at least one token")),
            ("--http-port 8081", ("--http-port", "--grpc-port", "8081")),
            ("--tenant-weights a=2", ("--tenant-weights", "--policy fair")),
            ("--batching static --policy priority", ("--batching static", "--policy priority")),
            ("--max-model-len 1000 --max-queue-tokens 500", ("--max-queue-tokens (500)", "--max-model-len (1000)")),
            ("--device cpu --dtype float16", ("--dtype float16", "--device cpu")),
            ("--model org/name", ("no file or directory", "hf://org/name")),
            ("--model /no/such/place", ("--model / CAROUSEL_MODEL", "/no/such/place")),
        ],
    )
    def test_settings_that_do_not_go_together(self, argv: str, words: tuple[str, ...]) -> None:
        messages = problems(*argv.split())
        assert any(all(word in message for word in words) for message in messages), messages

    def test_what_goes_together_is_taken(self) -> None:
        load_settings(["--http-port=8081", "--no-grpc"], {})
        load_settings(["--policy=fair", "--tenant-weights=a=2"], {})
        load_settings(["--max-batch-tokens=8", "--max-batch-sequences=8"], {})

    def test_no_collision_is_told_with_a_setting_that_could_not_be_read(self) -> None:
        assert len(problems("--max-batch-tokens", "x", "--max-batch-sequences", "4000")) == 1

    def test_a_cache_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert "not a directory" in problems("--cache-dir", str(tmp_path / "file"))[0]

    @pytest.mark.parametrize("text", ["0", "0.0", "0.96", "1", "1KiB", "a lot", "-1GiB", "40%"])
    def test_kv_memory_that_is_neither_size_nor_fraction(self, text: str) -> None:
        (message,) = problems(f"--kv-cache-memory={text}")
        assert "--kv-cache-memory / CAROUSEL_KV_CACHE_MEMORY" in message
        assert "a fraction above 0" in message

    @pytest.mark.parametrize("text", ["a", "=1", "a=1,a=2", "a=0", "a=-1", "a=x", "a=1001"])
    def test_weights_that_are_none(self, text: str) -> None:
        (message,) = problems("--policy", "fair", f"--tenant-weights={text}")
        assert "--tenant-weights" in message

    @pytest.mark.parametrize("name", ["a b", "a/b", "-x", "", "x" * 129])
    def test_model_names_must_fit_a_url(self, name: str) -> None:
        if name:
            assert "--model-name" in problems(f"--model-name={name}")[0]
        else:
            assert load_settings(["--model-name="], {}).model_name == Settings().model_name


class TestModel:
    @pytest.mark.parametrize(
        ("uri", "name"),
        [
            (config.DEMO_MODEL, "smollm2"),
            ("pypi://some-model==1.2", "some-model"),
            ("hf://Qwen/Qwen3-0.6B@main", "Qwen3-0.6B"),
            ("s3://bucket/models/llama/", "llama"),
            ("https://host/a/b%20c.gguf?x=1", "b-20c"),
            ("/mnt/models", "model"),
            ("/data/my model.gguf", "my-model"),
            ("file:///", "model"),
        ],
    )
    def test_a_name_for_each_uri(self, uri: str, name: str) -> None:
        assert Settings(model=uri).model_name == name
        assert SETTINGS["model_name"].accepts(name)

    def test_the_name_follows_the_model_and_yields_to_the_flag(self) -> None:
        assert load_settings(["--model", "hf://a/b"], {}).model_name == "b"
        assert load_settings(["--model", "hf://a/b", "--model-name", "c"], {}).model_name == "c"
        assert replace(Settings(model_name="mine"), http_port=1).model_name == "mine"

    def test_what_kserve_mounted_is_the_default_unless_empty(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(config, "MOUNTED_MODELS", tmp_path / "models")
        assert Settings().model == config.DEMO_MODEL
        (tmp_path / "models").mkdir()
        assert Settings().model == config.DEMO_MODEL
        (tmp_path / "models" / "config.json").touch()
        assert Settings().model == str(tmp_path / "models")
        assert Settings().model_name == "model"


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [("1024", 1024), ("1KiB", 1024), ("1kB", 1000), ("1.5GiB", 3 * 2**29), (" 2 mib ", 2**21), ("3T", 3 * 10**12)],
    )
    def test_units(self, text: str, size: int) -> None:
        assert parse_size(text) == size

    @pytest.mark.parametrize("text", ["", "GiB", "1 2", "-1", "1XiB", "1e3"])
    def test_no_sizes(self, text: str) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            parse_size(text)

    @given(st.integers(0, 2**50))
    def test_shown_sizes_are_read_back_to_half_a_percent(self, size: int) -> None:
        assert parse_size(format_size(size)) == pytest.approx(size, rel=0.006)


class TestCpus:
    def test_some_and_no_more_than_the_machine_has(self) -> None:
        assert 1 <= Settings().num_threads == available_cpus()
        assert Settings(threads=5).num_threads == 5

    def test_the_quota_of_cgroup_v2_is_the_least_on_the_way_up(self, tmp_path: Path) -> None:
        proc = tmp_path / "proc"
        proc.write_text("0::/pods/one\n")
        inner = tmp_path / "fs" / "pods" / "one"
        inner.mkdir(parents=True)
        assert cgroup_cpu_quota(tmp_path / "fs", proc) is None
        (inner / "cpu.max").write_text("max 100000\n")
        assert cgroup_cpu_quota(tmp_path / "fs", proc) is None
        (inner.parent / "cpu.max").write_text("150000 100000\n")
        assert cgroup_cpu_quota(tmp_path / "fs", proc) == 1.5
        (inner / "cpu.max").write_text("50000 100000\n")
        assert cgroup_cpu_quota(tmp_path / "fs", proc) == 0.5

    def test_the_quota_of_cgroup_v1(self, tmp_path: Path) -> None:
        proc = tmp_path / "proc"
        proc.write_text("4:cpu,cpuacct:/pod\n1:memory:/pod\n")
        pod = tmp_path / "fs" / "cpu" / "pod"
        pod.mkdir(parents=True)
        (pod / "cpu.cfs_quota_us").write_text("-1\n")
        (pod / "cpu.cfs_period_us").write_text("100000\n")
        assert cgroup_cpu_quota(tmp_path / "fs", proc) is None
        (pod / "cpu.cfs_quota_us").write_text("250000\n")
        assert cgroup_cpu_quota(tmp_path / "fs", proc) == 2.5

    @pytest.mark.parametrize(("quota", "cpus"), [(None, 4), (0.2, 1), (1.5, 2), (2.0, 2), (64.0, 4)])
    def test_quota_and_affinity_together(self, quota: float | None, cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
        monkeypatch.setattr("carousel.cpus.cgroup_cpu_quota", lambda: quota)
        assert available_cpus() == cpus
