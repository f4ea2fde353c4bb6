"""What needs no locust: histograms, figures, arrivals, workloads, objectives, wire formats."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadtest.arrivals import ArrivalError, Shape
from loadtest.figures import Board, Observation, Row
from loadtest.history import MOST_POINTS, History
from loadtest.options import add_options, problems
from loadtest.protocols import AnswerError, Target
from loadtest.sources import Limits, open_workload, prompt_of
from loadtest.traffic import Traffic

from carousel.bench.histogram import GROWTH, Histogram
from carousel.bench.measure import percentile
from carousel.bench.slo import SloError, parse_slo, split_slos
from carousel.bench.workload import WorkItem, WorkloadError, headers_of
from loadtest import figures, oip, protocols, report, slo

SAMPLES = Path(__file__).resolve().parents[2] / "loadtest" / "samples"
TIMES = st.lists(st.floats(0, 1000, allow_nan=False), min_size=1, max_size=60)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    known = parser.add_argument

    def add(*names: str, env_var: str = "", include_in_web_ui: bool = True, **more: object) -> None:
        known(*names, **more)  # type: ignore[arg-type]

    parser.add_argument = add  # type: ignore[assignment]
    add_options(parser)
    return parser.parse_args(list(words))


class TestHistogram:
    @given(TIMES, st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999, 1.0]))
    def test_a_percentile_is_the_exact_one_within_a_bucket(self, values: list[float], share: float) -> None:
        histogram = Histogram()
        for value in values:
            histogram.add(value)
        exact = percentile(sorted(values), share)
        found = histogram.percentile(share)
        assert found == pytest.approx(exact, rel=GROWTH - 1, abs=1e-6)

    @given(st.lists(TIMES, min_size=2, max_size=4))
    def test_merging_parts_is_counting_all(self, parts: list[list[float]]) -> None:
        whole, merged = Histogram(), Histogram()
        for part in parts:
            single = Histogram()
            for value in part:
                whole.add(value)
                single.add(value)
            merged.merge(Histogram.from_wire(json.loads(json.dumps(single.to_wire()))))
        assert merged.buckets == whole.buckets
        assert (merged.count, merged.least, merged.most) == (whole.count, whole.least, whole.most)
        assert merged.total == pytest.approx(whole.total)

    def test_nothing_counted(self) -> None:
        empty = Histogram.from_wire(Histogram().to_wire())
        assert empty.summary() == dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
        empty.add(2.0, times=3)
        assert (empty.least, empty.most, empty.mean) == (2.0, 2.0, 2.0)
        assert empty.share_at_most(1.0) == 0
        assert empty.share_at_most(2.0) == 1


def seen_of(**more: object) -> Observation:
    made = Observation(due=10.0, protocol="chat", sent=10.1, deltas=[(11.0, 2), (11.5, 1), (12.5, 1)], ended=12.5)
    for name, value in more.items():
        setattr(made, name, value)
    return made


class TestFigures:
    def test_times_count_from_when_it_was_due(self) -> None:
        times = seen_of(queue=0.25).times()
        assert times["ttft"] == [(1.0, 1)]
        assert times["e2e"] == [(2.5, 1)]
        assert times["itl"] == [(0.0, 1), (0.5, 1), (1.0, 1)]
        assert times["tpot"] == [(0.5, 1)]
        assert times["queue"] == [(0.25, 1)]
        assert times["lag"] == [(pytest.approx(0.1), 1)]

    def test_a_failure_has_no_latency_and_an_unfinished_one_at_least_its_age(self) -> None:
        assert set(seen_of(error="HTTP 500").times()) == {"lag"}
        waiting = seen_of(error="unfinished", unfinished=True, deltas=[], ended=40.0).times()
        assert waiting["ttft"] == waiting["e2e"] == [(30.0, 1)]

    def test_rows_rates_and_errors(self) -> None:
        board = Board()
        board.add(seen_of(group="gold", output_tokens=4, prompt_tokens=6))
        board.add(seen_of(due=11.0, error="HTTP 503", deltas=[], ended=15.0))
        rows = board.rows()
        assert list(rows) == ["all", "chat", "chat gold"]
        total = rows["all"].figures()
        assert (total["requests"], total["failures"], total["errors"]) == (2, 1, 0.5)
        assert total["wall"] == 5.0
        assert total["output_tokens_per_second"] == 4 / 5
        assert total["total_tokens_per_second"] == 10 / 5
        assert total["requests_per_second"] == 1 / 5
        assert rows["chat gold"].counts["requests"] == 1

    def test_a_master_keeps_each_workers_latest_state(self) -> None:
        workers, alone, master = [Board(), Board()], Board(), Board()
        for place in range(9):
            one = seen_of(due=10.0 + place / 10, group="ab"[place % 2])
            alone.add(one)
            workers[place % 2].add(one)
            for name, worker in enumerate(workers):  # often, and more than once
                master.take(str(name), json.loads(json.dumps(worker.to_wire())))
        for name, row in alone.rows().items():
            merged = master.rows()[name]
            assert (merged.counts, merged.start, merged.end) == (row.counts, row.start, row.end)
            assert {key: h.buckets for key, h in merged.times.items()} == {k: h.buckets for k, h in row.times.items()}

    def test_points_over_time_are_of_what_ended_since_the_last(self) -> None:
        board, now = Board(), [None]
        history = History(lambda: (board.rows().get("all"), now[0]))
        history.take()
        assert history.points == []  # no test is running
        now[0] = 2.0
        history.take()
        board.add(seen_of(output_tokens=4, queue=0.25))
        board.add(seen_of(output_tokens=6, deltas=[(10.5, 6)]))
        now[0] = 4.0
        history.take()
        board.add(seen_of(output_tokens=4, deltas=[(13.0, 4)]))
        now[0] = 6.0
        history.take()
        first, second, third = history.points
        assert (first["at"], first["requests_per_second"], first["ttft_p99"]) == (2.0, 0, None)
        assert (second["requests_per_second"], second["output_tokens_per_second"]) == (1.0, 5.0)
        assert second["queue_p50"] == pytest.approx(0.25, rel=GROWTH - 1)
        assert (third["requests_per_second"], third["output_tokens_per_second"]) == (0.5, 2.0)
        assert third["ttft_p50"] == third["ttft_p99"] == pytest.approx(3.0, rel=GROWTH - 1)
        board.clear()
        now[0] = 2.0  # another test
        history.take()
        assert [point["at"] for point in history.points] == [2.0]

    def test_a_long_test_has_fewer_points_further_apart(self) -> None:
        now = [0.0]
        history = History(lambda: (None, now[0]))
        seconds = history.seconds
        for _ in range(3 * MOST_POINTS):
            now[0] += history.seconds
            history.take()
        assert MOST_POINTS // 2 <= len(history.points) <= MOST_POINTS
        assert history.seconds == 16 * seconds  # one halving after 900 points, and one for each 450 more
        gaps = {after["at"] - before["at"] for before, after in itertools.pairwise(history.points)}
        assert gaps == {16 * seconds}
        assert history.points[-1]["at"] == now[0]

    def test_table_csv_and_json_agree(self) -> None:
        board = Board()
        board.add(seen_of(output_tokens=4))
        lines = report.to_csv(board.rows()).splitlines()
        values = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
        written = json.loads(report.to_json(board.rows(), {"host": "x"}))["rows"]["all"]
        assert float(values["ttft_p99"]) == written["ttft"]["p99"] == 1.0
        assert Histogram.from_wire(written["histograms"]["itl"]).count == 3
        assert "1000.0" in report.table(board.rows()).splitlines()[1]


def drawn(shape: Shape, seed: int = 1, most: int = 20_000) -> list[float]:
    return list(itertools.islice(shape.times(seed), most))


def between(times: list[float], begin: float, end: float) -> float:
    return sum(begin <= time < end for time in times) / (end - begin)


class TestArrivals:
    def test_equal_seeds_give_equal_times_which_rise(self) -> None:
        shape = Shape("gamma", 5.0, 100.0)
        assert drawn(shape) == drawn(shape)
        assert drawn(shape) != drawn(shape, seed=2)
        assert drawn(shape) == sorted(drawn(shape))

    @pytest.mark.parametrize(("name", "variation"), [("uniform", 0.0), ("poisson", 1.0), ("gamma", 3.0)])
    def test_gaps_have_the_mean_and_the_variation(self, name: str, variation: float) -> None:
        times = drawn(Shape(name, 10.0))
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.1)
        assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.1, abs=1e-6)

    def test_ramp_step_and_spike_have_their_rates(self) -> None:
        ramp = drawn(Shape("ramp", 10, 100, peak=110))
        assert len(ramp) == pytest.approx(6000, rel=0.05)
        assert between(ramp, 0, 10) == pytest.approx(15, rel=0.2)
        assert between(ramp, 90, 100) == pytest.approx(105, rel=0.1)
        step = drawn(Shape("step", 10, 100, peak=40, levels=4))
        assert [between(step, at, at + 25) for at in (0, 25, 50, 75)] == pytest.approx([10, 20, 30, 40], rel=0.2)
        spike = drawn(Shape("spike", 10, 100, peak=100))
        assert between(spike, 40, 60) == pytest.approx(100, rel=0.1)
        assert between(spike, 60, 100) == pytest.approx(10, rel=0.2)

    def test_diurnal_follows_its_curve_and_keeps_its_mean(self) -> None:
        shape = Shape("diurnal", 20, 240, day=120, curve=(0, 0, 3, 1))
        times = drawn(shape)
        assert len(times) == pytest.approx(20 * 240, rel=0.05)
        assert between(times, 60, 90) > 2 * between(times, 0, 30)
        assert between(times, 0, 25) == 0  # flat at nothing: nobody comes

    def test_replay_takes_the_gaps_as_they_are(self) -> None:
        times = list(itertools.islice(Shape("replay", 2.0).times(0, [0.5, 1.5]), 4))
        assert times == [0.25, 1.0, 1.25, 2.0]
        with pytest.raises(ArrivalError, match="replay: the workload says nothing"):
            next(Shape("replay").times(0, [0.0]))

    @pytest.mark.parametrize(
        ("more", "option"),
        [
            ({"name": "sine"}, "--shape sine: allowed is poisson"),
            ({"rate": 0}, "--rate 0: allowed"),
            ({"rate": math.inf}, "--rate inf"),
            ({"duration": -1}, "--duration -1"),
            ({"name": "ramp", "duration": 10}, "--peak 0.0"),
            ({"name": "spike", "peak": 3}, "--duration inf: allowed is finite"),
            ({"name": "gamma", "burstiness": 0}, "--burstiness 0"),
            ({"name": "step", "levels": 1, "peak": 2, "duration": 9}, "--levels 1"),
            ({"name": "diurnal", "curve": (0.0, 0.0)}, "--day-curve"),
        ],
    )
    def test_a_wrong_one_is_named(self, more: dict[str, object], option: str) -> None:
        with pytest.raises(ArrivalError, match=option):
            Shape(**({"name": "poisson"} | more))  # type: ignore[arg-type]

    def test_shares_of_workers_make_the_whole(self) -> None:
        chosen = options("--rate", "50", "--requests", "20", "--duration", "2")
        assert problems(chosen) == []

        def taken(share: tuple[int, int]) -> list[tuple[float | None, str]]:
            traffic = Traffic(chosen, Board(), share)
            traffic.begin()
            return [(due, item.id) for due, item in iter(traffic.take, None)]

        whole = taken((0, 1))
        assert len(whole) > 60
        assert sorted(taken((0, 3)) + taken((1, 3)) + taken((2, 3))) == whole


class TestOptions:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--protocol", "chat,smtp"), "argument --protocol: 'smtp': allowed are chat, "),
            (("--slo", "errors=2"), "argument --slo: --slo 'errors=2': a share of 2 is above 1"),
            (("--shape", "sine"), "argument --shape: invalid choice: 'sine'"),
        ],
    )
    def test_a_bad_word_is_refused(
        self, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            options(*words)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--concurrency", "0"), "--concurrency 0: allowed is 1 or more"),
            (("--requests", "-1"), "--requests -1: allowed is 0 or more"),
            (("--max-output-tokens", "0"), "--max-prompt-tokens and --max-output-tokens"),
            (("--shape", "diurnal", "--day-curve", "1,x"), "--day-curve 1,x: allowed are numbers"),
        ],
    )
    def test_values_that_cannot_be_are_named(self, words: tuple[str, ...], message: str) -> None:
        (problem,) = problems(options(*words))
        assert message in problem


class TestWorkloads:
    def test_traces(self) -> None:
        burst = open_workload(str(SAMPLES / "burstgpt.csv"), Limits(prompt=300, output=100))
        assert len(burst.items) == 38  # two of the forty failed
        assert burst.items[0].output_len == 57
        assert len(burst.items[0].prompt.split()) == round(93 / 1.35)
        assert max(item.output_len for item in burst.items) <= 100
        azure = open_workload(str(SAMPLES / "azure-llm.csv"), Limits(requests=10))
        assert statistics.fmean(item.unit_gap for item in azure.items) == pytest.approx(1)
        assert azure.items[1].unit_gap / azure.items[2].unit_gap == pytest.approx(0.4327309 / 1.2, rel=10)

    def test_fitted_lengths_have_the_traces_logarithms(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        lengths = [20, 40, 80, 160, 320] * 4
        rows = [f"{place},m,{length},{length // 2},0,x" for place, length in enumerate(lengths)]
        path.write_text("\n".join(["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", *rows]))
        made = open_workload(f"fitted:{path}", Limits(requests=1500, output=4096))
        logs = [math.log(item.output_len) for item in made.items]
        assert statistics.fmean(logs) == pytest.approx(math.log(40), rel=0.05)
        assert max(item.output_len for item in made.items) <= 160

    def test_sharegpt_answers_become_requests_with_what_was_said_before(self) -> None:
        items = open_workload(str(SAMPLES / "sharegpt.json"), Limits()).items
        assert [len(item.messages) for item in items] == [1, 3, 2, 1, 3, 5]
        assert items[1].messages[:1] == items[0].messages
        assert items[2].messages[0] == ("system", "Answer in one sentence.")

    def test_chats_share_prefixes(self) -> None:
        items = open_workload("chats", Limits(requests=60)).items
        assert len({item.messages[0] for item in items}) == 3
        known = {item.messages for item in items}
        later = [item for item in items if len(item.messages) > 2]
        assert later
        assert all(item.messages[:-2] in known for item in later)
        assert items == open_workload("chats", Limits(requests=60)).items

    def test_interference_and_tenants_have_groups(self) -> None:
        mixed = open_workload("interference", Limits(requests=16, prompt=1000)).items
        assert [item.group for item in mixed[6:9]] == ["short", "long", "short"]
        assert len(mixed[7].prompt.split()) > 10 * len(mixed[6].prompt.split())
        shared = open_workload("tenants", Limits(requests=200)).items
        assert {item.group for item in shared} == {"interactive", "standard", "batch"}
        assert {item.priority for item in shared if item.tenant == "interactive"} == {0}

    def test_a_file_may_name_tenants(self, tmp_path: Path) -> None:
        path = tmp_path / "w.json"
        path.write_text(json.dumps([{"prompt": "a", "output_len": 1, "tenant": "gold", "priority": 2}]))
        item = open_workload(str(path), Limits()).items[0]
        assert (item.tenant, item.priority, item.group) == ("gold", 2, "gold")
        for wrong, field in (({"tenant": 3}, "tenant"), ({"priority": "high"}, "priority")):
            path.write_text(json.dumps([{"prompt": "a", "output_len": 1} | wrong]))
            with pytest.raises(WorkloadError, match=f"request 0: {field} must be"):
                open_workload(str(path), Limits())

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("a.csv", "when,what\n1,2\n", "columns are when, what; known are BurstGPT"),
            ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "line 2: the timestamp must be"),
            ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,many,2\n", "line 2: ContextTokens must be a number"),
            ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,5,0\n", "no request with a prompt"),
            ("a.csv", "", "no request with a prompt"),
            ("a.json", '[{"conversations": [{"from": "cat", "value": "x"}]}]', "turn 0: from must be one of"),
            ("a.json", '[{"conversations": 3}]', "must be a list of turns"),
            ("a.json", "{", "not JSON"),
            ("a.txt", "", "--workload .*a.txt: allowed is synthetic"),
        ],
    )
    def test_a_wrong_file_is_named(self, name: str, text: str, message: str, tmp_path: Path) -> None:
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(WorkloadError, match=message):
            open_workload(str(path), Limits())

    def test_prompts_have_about_the_asked_length(self) -> None:
        import random

        assert len(prompt_of(random.Random(1), 1350).split()) == 1000


class TestSlo:
    def rows(self) -> dict[str, Row]:
        board = Board()
        for place in range(100):
            board.add(seen_of(due=0.0, deltas=[(0.01 * (place + 1), 1)], ended=1.0, output_tokens=1, group="gold"))
        return board.rows()

    @pytest.mark.parametrize(
        ("text", "met"),
        [
            ("ttft_p50=600ms", True),
            ("ttft_p50=400ms", False),
            ("ttft_p99.9<=1.1s", True),
            ("ttft_max=0.9s", False),
            ("ttft_mean[chat gold]=510ms", True),
            ("errors=0%", True),
            ("output_tokens_per_second>=99", True),
            ("output_tokens_per_second=101", False),
            ("itl_p99=1s", False),  # nothing was measured
            ("ttft_p99[nobody]=9s", False),
        ],
    )
    def test_verdicts(self, text: str, met: bool) -> None:
        (verdict,) = slo.judge([parse_slo(text, figures.TIMES)], self.rows())
        assert verdict.met is met
        assert text in verdict.line()

    @pytest.mark.parametrize(
        "text", ["ttft_p99", "ttft=1s", "ttfb_p99=1s", "ttft_p99=1", "ttft_p99=fast", "errors=2", "itl_q=1s", "=1s"]
    )
    def test_a_bad_one_is_refused_with_what_is_allowed(self, text: str) -> None:
        with pytest.raises(SloError, match=r"allowed is NAME=LIMIT") as caught:
            parse_slo(text, figures.TIMES)
        assert repr(text) in str(caught.value)

    def test_several_in_one_option(self) -> None:
        assert split_slos(["a=1, b=2", "c[x y]=3 d=4"]) == ["a=1", "b=2", "c[x y]=3", "d=4"]

    def test_junit(self, tmp_path: Path) -> None:
        verdicts = slo.judge([parse_slo("ttft_p50=1s"), parse_slo("ttft_p50=1ms")], self.rows())
        slo.write_junit(tmp_path / "deep" / "j.xml", verdicts, 2.0)
        suite = ElementTree.parse(tmp_path / "deep" / "j.xml").getroot()[0]
        assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
        assert [case.find("failure") is None for case in suite] == [True, False]


class TestWire:
    ITEM = WorkItem("1", "hello", (5, 6), 3, 0.0, tenant="gold", priority=-1)

    def test_bodies(self) -> None:
        ours, plain = Target("m"), Target("m", "/openai/v1", extensions=False)
        assert protocols.body_of("completions", self.ITEM, ours)["prompt"] == [5, 6]
        assert protocols.body_of("completions", self.ITEM, plain)["prompt"] == "hello"
        chat = protocols.body_of("chat", self.ITEM, plain)
        assert chat["messages"] == [{"role": "user", "content": "hello"}]
        assert not {"ignore_eos", "return_token_ids"} & set(chat)
        assert protocols.path_of("chat", plain) == "/openai/v1/chat/completions"
        assert headers_of(self.ITEM) == {"x-carousel-tenant": "gold", "x-carousel-priority": "-1"}

    def test_our_own_server_reads_the_bodies(self) -> None:
        from tests.protocols.protocol_fakes import context as make_context

        from carousel.protocols import generate, openai_chat, openai_completions

        context = make_context()
        target, item = Target(context.model_name), WorkItem("1", "hello", (), 3, 0.0)
        for protocol, parse in (
            ("chat", openai_chat.parse_chat),
            ("completions", openai_completions.parse_completion),
            ("generate", lambda body, context: generate.parse(body, context, stream=True)),
        ):
            call = parse(protocols.body_of(protocol, item, target), context)
            assert call.requests[0].sampling.max_tokens == 3, protocol

    def test_events(self) -> None:
        seen = Observation(0.0, "chat")
        chunk = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        assert not protocols.read_event("chat", json.dumps(chunk).encode(), 1.0, seen)
        chunk = {"choices": [{"delta": {"content": "ab"}, "token_ids": [1, 2]}]}
        protocols.read_event("chat", json.dumps(chunk).encode(), 2.0, seen)
        chunk = {"choices": [{"delta": {"content": "c"}, "finish_reason": "length"}]}  # a server without token ids
        protocols.read_event("chat", json.dumps(chunk).encode(), 3.0, seen)
        usage = {"usage": {"prompt_tokens": 4, "completion_tokens": 3, "queue_time": 0.5}, "choices": []}
        protocols.read_event("chat", json.dumps(usage).encode(), 4.0, seen)
        assert protocols.read_event("chat", b"[DONE]", 5.0, seen)
        assert seen.deltas == [(2.0, 2), (3.0, 1)]
        assert (seen.prompt_tokens, seen.tokens, seen.queue) == (4, 3, 0.5)
        protocols.read_headers({"server-timing": "db;dur=1, queue;desc=x;dur=12.5"}, seen)
        assert seen.queue == 0.0125

    @pytest.mark.parametrize("data", [b'{"error": {"message": "no"}}', b"{", b"[]", b'{"choices": [3]}'])
    def test_a_bad_event_is_an_error(self, data: bytes) -> None:
        with pytest.raises(AnswerError):
            protocols.read_event("chat", data, 0.0, Observation(0.0, "chat"))

    def test_an_infer_answer_without_text_is_an_error(self) -> None:
        for raw in (b"{", b'{"outputs": [{"name": "x", "data": []}]}', b'{"error": "y"}'):
            with pytest.raises(AnswerError):
                protocols.read_infer(raw, Observation(0.0, "infer"))

    def test_our_grpc_messages_are_kserves_on_the_wire(self) -> None:
        from carousel.server import bare_arguments

        with bare_arguments():
            from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

        from carousel.grpc_messages import StreamResponse

        sent = oip.infer_request("m", "hé", {"max_tokens": 3, "ignore_eos": True, "temperature": "0"}, "id7")
        read = pb.ModelInferRequest.FromString(sent.SerializeToString())
        assert (read.model_name, read.id, read.inputs[0].contents.bytes_contents[0]) == ("m", "id7", "hé".encode())
        assert read.parameters["max_tokens"].int64_param == 3
        assert read.parameters["ignore_eos"].bool_param is True
        assert read.parameters["temperature"].string_param == "0"
        answer = pb.ModelInferResponse(id="id7")
        answer.outputs.add(name="completion_tokens", datatype="INT32", shape=[1])
        answer.raw_output_contents.append((300).to_bytes(4, "little"))
        answer.parameters["triton_final_response"].bool_param = True
        raw = StreamResponse(infer_response=answer).SerializeToString()
        seen = Observation(0.0, "grpc-stream")
        assert protocols.read_tensors(oip.StreamResponse.FromString(raw).infer_response, 1.0, seen)
        assert seen.deltas == [(1.0, 300)]
