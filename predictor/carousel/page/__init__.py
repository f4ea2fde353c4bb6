"""The live page at ``/``: what the engine does, for people, while somebody looks."""
