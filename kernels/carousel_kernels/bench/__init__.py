"""How close the operators come to the device's memory: ``python -m carousel_kernels.bench``."""
