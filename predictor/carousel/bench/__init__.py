"""``carousel bench``: a workload against the engine in-process or a server over HTTP, measured the same way."""
