#!/usr/bin/env bash
# The GPU kernel on a real GPU: correctness over tile sizes and seeds, then the share of the memory bandwidth it reaches.
# Needs a CUDA build of JAX (0.10 or newer), NumPy and ml_dtypes; nothing else. Ends with a short table. A few minutes.
set -eu
cd "$(dirname "$0")/.."
exec env PYTHONPATH="$PWD" PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false "${PYTHON:-python3}" benchmarks/on_gpu.py "$@"
