"""Triton's gRPC client, streams and configuration, against the server at argv[1]; prints what it saw as JSON."""

from __future__ import annotations

import asyncio
import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import model_config_pb2

results: dict[str, object] = {}


def text_input(*prompts: bytes):
    tensor = triton.InferInput("text_input", [len(prompts)], "BYTES")
    tensor.set_data_from_numpy(np.array(prompts, dtype=object))
    return [tensor]


def text(result, name: str = "text_output") -> str:
    return result.as_numpy(name).reshape(-1)[0].decode()


def is_final(result) -> bool:
    return result.get_response().parameters["triton_final_response"].bool_param


def stream(client) -> None:
    """The way of Triton's own examples: a callback, ``async_stream_infer`` and the final flag."""
    answers: queue.Queue = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for request_id, tokens in (("one", 3), ("two", 5)):
        client.async_stream_infer(
            "fake", text_input(b"abc"), request_id=request_id, parameters={"max_tokens": tokens, "temperature": 0.5},
            enable_empty_final_response=request_id == "two", priority=1, timeout=30_000_000,
            outputs=[triton.InferRequestedOutput("text_output"), triton.InferRequestedOutput("finish_reason")],
        )  # fmt: skip
    client.async_stream_infer("fake", text_input(b"x"), request_id="bad", parameters={"temperature": -0.5})
    client.async_stream_infer("other", text_input(b"x"), request_id="lost")
    texts, reasons, ends, errors = {"one": "", "two": ""}, [], [], []
    while len(ends) < 2 or len(errors) < 2:
        result, error = answers.get(timeout=10)
        if error is not None:
            errors.append(str(error))
            continue
        request_id = result.get_response().id
        if result.as_numpy("text_output") is not None:
            texts[request_id] += text(result)
            reasons += [text(result, "finish_reason")] if text(result, "finish_reason") else []
        if is_final(result):
            ends.append([request_id, len(result.get_response().outputs)])
    client.stop_stream()
    results["stream"] = {
        "texts": texts, "reasons": reasons, "ends": sorted(ends), "errors": sorted(errors), "left": answers.qsize()
    }  # fmt: skip


def cancel(client) -> None:
    answers: queue.Queue = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    client.async_stream_infer("fake", text_input(b"abc"), parameters={"max_tokens": 100_000})
    answers.get(timeout=10)
    client.stop_stream(cancel_requests=True)


def configuration(client) -> None:
    config, kind = client.get_model_config("fake", "1").config, model_config_pb2.DataType.Name
    results["config"] = {
        "name": config.name,
        "inputs": [[item.name, kind(item.data_type), list(item.dims)] for item in config.input],
        "outputs": {item.name: kind(item.data_type) for item in config.output},
        "decoupled": config.model_transaction_policy.decoupled,
        "max_batch_size": config.max_batch_size,
    }
    results["index"] = [[m.name, m.version, m.state] for m in client.get_model_repository_index().models]
    results["statistics"] = [
        [[model.name, model.version, model.inference_stats.success.count] for model in answer.model_stats]
        for answer in (client.get_inference_statistics("fake", "1"), client.get_inference_statistics())
    ]
    metadata = client.get_server_metadata()
    results["server"] = [metadata.name, list(metadata.extensions)]
    model = client.get_model_metadata("fake", "1")
    results["model"] = [model.name, model.platform, [[i.name, i.datatype, list(i.shape)] for i in model.inputs]]
    for name, call in (
        ("unknown_config", lambda: client.get_model_config("other")),
        ("unknown_version", lambda: client.get_model_config("fake", "7")),
        ("unknown_ready", lambda: client.is_model_ready("other")),
        ("unknown_statistics", lambda: client.get_inference_statistics("other")),
        ("shared_memory", lambda: client.get_system_shared_memory_status()),
    ):
        try:
            results[name] = str(call())
        except triton.InferenceServerException as error:
            results[name] = str(error)
    for algorithm in ("gzip", "deflate"):
        answer = client.infer(
            "fake", text_input(b"a" * 2000), compression_algorithm=algorithm, parameters={"max_tokens": 1}
        )
        results[algorithm] = [text(answer), int(answer.as_numpy("prompt_tokens")[0])]


async def aio_stream() -> None:
    async with triton_aio.InferenceServerClient(sys.argv[1]) as client:

        async def requests():
            for i in range(3):
                yield {
                    "model_name": "fake", "inputs": text_input(b"abc"), "request_id": f"r{i}",
                    "parameters": {"max_tokens": 2 + i},
                }  # fmt: skip
            yield {"model_name": "fake", "inputs": text_input(b"x"), "request_id": "bad", "parameters": {"top_p": 7.0}}

        texts, errors = {}, []
        async for result, error in client.stream_infer(requests(), stream_timeout=30, compression_algorithm="gzip"):
            if error is not None:
                errors.append(str(error))
                continue
            request_id = result.get_response().id
            texts[request_id] = texts.get(request_id, "") + text(result)
        iterator = client.stream_infer(requests())
        await iterator.__anext__()
        results["aio"] = {"texts": texts, "errors": errors, "cancelled": iterator.cancel()}


if __name__ == "__main__":
    with triton.InferenceServerClient(sys.argv[1]) as triton_client:
        stream(triton_client)
        cancel(triton_client)
        configuration(triton_client)
    asyncio.run(aio_stream())
    print(json.dumps(results))
