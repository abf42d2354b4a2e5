"""What there is to run tests of GPUs with."""

import importlib.util

import torch

ON_GPU = torch.cuda.is_available()
TE = ON_GPU and importlib.util.find_spec("transformer_engine") is not None
