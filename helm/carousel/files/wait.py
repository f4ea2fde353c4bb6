"""What the load test waits for: the server of the release is ready."""

import os
import ssl
import sys
import time
import urllib.request

URL, SECONDS = os.environ["URL"] + "/v2/health/ready", float(os.environ["SECONDS"])
end = time.monotonic() + SECONDS
unchecked = ssl._create_unverified_context()  # as locust, which looks at no certificate either
while True:
    try:
        urllib.request.urlopen(URL, timeout=5, context=unchecked if URL.startswith("https") else None)
        sys.exit()
    except OSError as error:
        if time.monotonic() > end:
            sys.exit(f"{URL} is not ready: {error}")
        time.sleep(1)
