"""The Megatron-Core host: process groups, model and optimizer, schedules, checkpoints, the training loop."""

import logging
import warnings

# What megatron-core says on import about packages that zoo does without (Apex, Transformer Engine) is no news here.
warnings.filterwarnings("ignore", module=r"megatron\.")
logging.getLogger("megatron").setLevel(logging.ERROR)
# It imports torch's C++ extension builder, which has a CUDA toolkit without a GPU to report.
logging.getLogger("torch.utils.cpp_extension").addFilter(
    lambda record: not record.msg.startswith("No CUDA runtime is found")
)
