"""What is not distributed: nothing in this package imports `torch.distributed`."""

import os

# Every rank would repeat, at import, that torchvision is not installed; it is not needed.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
