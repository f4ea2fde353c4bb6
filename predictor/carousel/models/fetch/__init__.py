"""How a model gets from where it lies onto the local disk; `carousel.models.source.resolve` is the way in."""
