import os
import ssl
import sys
import time
import urllib.request

url, end = os.environ["URL"] + "/v2/health/ready", time.monotonic() + float(os.environ["SECONDS"])
unchecked = ssl._create_unverified_context()  # whether it is there; the load test itself looks at certificates
while True:
    try:
        urllib.request.urlopen(url, timeout=5, context=unchecked if url.startswith("https") else None)
        sys.exit()
    except OSError as error:
        if time.monotonic() > end:
            sys.exit(f"{url} is not ready: {error}")
        time.sleep(1)
