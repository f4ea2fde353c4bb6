"""Where the Triton kernels run in tests: on the GPU if there is one, otherwise in Triton's interpreter.

Triton decides that when a kernel is defined and looks at this variable when it is imported, so it is set before any
test module is. Nothing else reads it: servers that tests start use the CPU backend as always.
"""

from __future__ import annotations

import os
from pathlib import Path

if not any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
