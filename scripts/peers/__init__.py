"""Other engines to measure beside Carousel: how to install them, and a program for each that runs a job on it.

``run_*.py`` run in the environment of their engine, which has no Carousel, and share ``job.py``, which needs nothing
but Python. The rest is for ``scripts/bench_peers.py``.
"""
