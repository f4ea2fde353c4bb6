#!/usr/bin/env bash
# Everything that a GPU has to say about Carousel, in at most 12 minutes: kernels against the reference, the engine against
# transformers, the roofline, decode speed, graph capture, small steps with prompts in pieces, loading from disk, static
# against continuous batching, latency beside long prompts.
# Needs python3 with torch, triton and transformers, nothing else. Run it again after an interruption: what has finished is
# kept in the folder --out (default gpu-check), which ends up with report.json and report.md.
#
#   scripts/gpu_check.sh [--out DIR] [--tiny] [--stages kernels,parity,...]
#
# --tiny: tiny shapes on the CPU, the kernels in Triton's interpreter: proves that the script runs to its end.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
export PYTHONPATH="predictor:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$python" -m scripts.gpu_check "$@"
