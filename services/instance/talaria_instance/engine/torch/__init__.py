"""Engine on PyTorch: Llama- and Qwen-type decoders, paged KV and weights in one arena.

Importing this package loads no torch; `engine` does.
"""

import os

# Two spinning OpenMP threads on two cores can collapse (a decode step takes ten times as long), and
# libgomp reads this once, when torch is first imported: docs of libgomp, OMP_WAIT_POLICY.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
