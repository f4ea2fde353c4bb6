"""What `helm test` runs, in the image of the release: the model is ready and answers over V2 and OpenAI's API."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

URL, MODEL, SECONDS = os.environ["URL"], os.environ["MODEL"], float(os.environ["SECONDS"])
MOUNTED = Path("/etc/carousel")


def tls() -> ssl.SSLContext | None:
    """The release's authority, and the certificate to show where one is asked for; None without TLS."""
    if not URL.startswith("https"):
        return None
    context = ssl.create_default_context(cafile=str(MOUNTED / "authority/ca.crt"))
    context.check_hostname = False  # certificates may name a host outside of the cluster
    if (MOUNTED / "tls-client").exists():
        context.load_cert_chain(MOUNTED / "tls-client/tls.crt", MOUNTED / "tls-client/tls.key")
    return context


def headers() -> dict[str, str]:
    """The first API key, if keys are asked for."""
    found = {"content-type": "application/json"}
    keys = MOUNTED / "api-keys"
    for file in sorted(keys.iterdir()) if keys.exists() else ():
        if not file.is_file():
            continue
        lines = (line.strip() for line in file.read_text("utf-8").splitlines())
        for line in lines:
            if line and not line.startswith("#"):
                # KEY or KEY=TENANT, and a key may hold an = of its own: tell them apart as the server does.
                key, separator, tenant = line.rpartition("=")
                tied = separator and len(key) >= 8 and tenant[:1].isalnum()
                return found | {"x-api-key": key if tied else line}
    return found


def call(path: str, body: object = None) -> str:
    """The text of an answer. Raises OSError: there was none, or not 200."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, headers())
    with urllib.request.urlopen(request, timeout=SECONDS, context=tls()) as answer:
        return str(answer.read().decode())


def wait_ready() -> None:
    """Until the model is ready, or raise the last error."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            call(f"/v2/models/{MODEL}/ready")
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(1)


def main() -> int:
    try:
        wait_ready()
        generated = json.loads(
            call(f"/v2/models/{MODEL}/generate", {"text_input": "1 2 3", "parameters": {"max_tokens": 4}})
        )
        print("V2 generate:", json.dumps(generated["text_output"]))
        body = {"model": MODEL, "prompt": "1 2 3", "max_tokens": 4}
        completed = json.loads(call("/openai/v1/completions", body))
        print("OpenAI completion:", json.dumps(completed["choices"][0]["text"]))
        tokens = [line for line in call("/metrics").splitlines() if line.startswith("carousel_generation_tokens_total")]
        print(*tokens, sep="\n")
    except urllib.error.HTTPError as error:
        print(f"{error.url}: {error.code} {error.read().decode(errors='replace')[:500]}", file=sys.stderr)
        return 1
    except (OSError, KeyError, ValueError) as error:
        print(f"{URL}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0 if tokens else 1


if __name__ == "__main__":
    sys.exit(main())
