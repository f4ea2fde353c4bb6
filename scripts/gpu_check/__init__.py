"""What is checked on a GPU when one can be had: ``python -m scripts.gpu_check``, or ``scripts/gpu_check.sh``."""
