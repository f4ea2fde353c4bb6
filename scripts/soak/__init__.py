"""``make soak``: a server under mixed load, mistakes and departures for a long time, and what became of it."""
