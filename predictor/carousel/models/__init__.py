"""From a model on disk to logits: families, the decoder, weights, tokenizer and the loader that joins them."""
