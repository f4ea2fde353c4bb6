"""Triton's gRPC client against the server at argv[1]; prints what it saw as JSON."""

from __future__ import annotations

import json
import sys

import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient(sys.argv[1])
tensor = triton.InferInput("text_input", [2], "BYTES")
tensor.set_data_from_numpy(np.array([b"a", b"bc"], dtype=object))
results = {
    "live": client.is_server_live(),
    "ready": client.is_server_ready(),
    "model_ready": client.is_model_ready("fake", "1"),
    "versions": list(client.get_model_metadata("fake").versions),
}
answer = client.infer("fake", [tensor], request_id="my id", parameters={"max_tokens": 2, "temperature": 0.5})
results["texts"] = [text.decode() for text in answer.as_numpy("text_output").reshape(-1)]
results["id"] = answer.get_response().id
try:  # a float parameter travels as double_param, which KServe's copy of the protocol does not know
    client.infer("fake", [tensor], parameters={"temperature": -0.5})
except triton.InferenceServerException as error:
    results["temperature_error"] = str(error)
try:
    client.unload_model("fake")
except triton.InferenceServerException as error:
    results["unload_error"] = str(error)
print(json.dumps(results))
