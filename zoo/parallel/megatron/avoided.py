"""Faults of megatron-core that no call of zoo's reaches; `zoo.parallel.megatron.compat` fixes the others, and says how they are tested."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`fault` is a sentence; `last_broken` the newest megatron-core in which a test has shown it, and which zoo was tried with."""

    name: str
    fault: str
    last_broken: str


@dataclass(frozen=True, kw_only=True)
class Avoided(Fault):
    """A fault that no call of zoo's reaches: `instead` says what does the work, with its file."""

    instead: str


AVOIDED = (
    Avoided(
        name="expert-bias-mask",
        fault="TopKRouter._apply_expert_bias combines a (tokens, experts) map with a (tokens,) padding mask",
        last_broken="0.19.2",
        instead="the router counts with one more axis to the mask (zoo/nn/decoder/experts/router.py)",
    ),
    Avoided(
        name="mtp-rolls-by-real-offsets",
        fault="multi-token prediction shifts tokens by the offsets without padding, so where segments are padded it "
        "hands one sample's tokens to another",
        last_broken="0.19.2",
        instead="rows for every depth are made on the host, by the index within the segment (zoo/nn/decoder/mtp.py)",
    ),
    Avoided(
        name="mrope-zigzags-the-pack",
        fault="MultimodalRotaryEmbedding splits the angles of a packed row over CP ranks as if it were one sample",
        last_broken="0.19.2",
        instead="angles are made from positions that the layout's index has sliced (zoo/nn/decoder/attention/rotary.py)",
    ),
    Avoided(
        name="mrope-has-blocks-alone",
        fault="MultimodalRotaryEmbedding gives each axis a block of frequencies (Qwen2); Qwen3 interleaves them",
        last_broken="0.19.2",
        instead="an axis for each frequency (zoo/nn/decoder/attention/rotary.py)",
    ),
    Avoided(
        name="torch-norm-without-sp",
        fault="WrappedTorchNorm refuses sequence parallelism",
        last_broken="0.19.2",
        instead="an RMSNorm whose weight is marked for it (zoo/nn/decoder/norm.py)",
    ),
    Avoided(
        name="local-attention-refuses-packing",
        fault="DotProductAttention, the attention without Transformer Engine, takes no packed row",
        last_broken="0.19.2",
        instead="varlen attention (zoo/nn/decoder/attention/self_attention.py)",
    ),
    Avoided(
        name="padding-mask-not-scattered",
        fault="GPTModel leaves the padding mask whole under sequence parallelism when it is given embeddings",
        last_broken="0.19.2",
        instead="each rank cuts its part on every pipeline stage (zoo/nn/multimodal.py)",
    ),
    Avoided(
        name="gated-delta-rule-refuses-packing",
        fault="the gated delta rule in plain torch takes no offsets, so a packed row has one state through all samples",
        last_broken="0.19.2",
        instead="a varlen rule that starts anew in each segment (zoo/nn/decoder/attention/gated_delta_net.py)",
    ),
    Avoided(
        name="gated-delta-net-waits-for-the-device",
        fault="GatedDeltaNet reads the last offset of a packed row from the device in every layer",
        last_broken="0.19.2",
        instead="the layout knows its lengths on the host (zoo/packing/layout.py)",
    ),
    Avoided(
        name="ep-overlap-drops-the-mask",
        fault="the schedule that overlaps expert exchange with computing routes without the padding mask",
        last_broken="0.19.2",
        instead="no key of a recipe switches that schedule on (zoo/config/schema)",
    ),
    Avoided(
        name="cp-batch-slices-four-keys",
        fault="get_batch_on_this_cp_rank leaves the padding mask of a packed row whole, and slices positions "
        "(axes, 1, T) on the wrong dimension",
        last_broken="0.19.2",
        instead="one index slices everything with a token axis (zoo/steps/packed_step.py)",
    ),
    Avoided(
        name="router-in-tf32",
        fault="where Transformer Engine is installed, under any backend, the router's product of fp32 values is its GEMM, "
        "which rounds them to TF32: gradients of tiny models are off by 3e-4 to 8e-4",
        last_broken="0.19.2",
        instead="a plain product of fp32 values (zoo/nn/decoder/experts/router.py)",
    ),
    Avoided(
        name="z-loss-averages-ranks",
        fault="the router's z-loss is a mean over ranks of their means: tokens that share a rank with padding weigh more",
        last_broken="0.19.2",
        instead="a mean over all real tokens (zoo/nn/decoder/experts/router.py)",
    ),
    Avoided(
        name="llava-keeps-old-offsets",
        fault="LLaVAModel replaces image tokens by embeddings and leaves the offsets of the packed row as they were",
        last_broken="0.19.2",
        instead="expansion gives a new layout (zoo/packing/placeholder.py)",
    ),
    Avoided(
        name="experts-one-by-one",
        fault="SequentialMLP, the experts without Transformer Engine, calls one expert after another",
        last_broken="0.19.2",
        instead="two stacked weights and a grouped product (zoo/nn/decoder/experts/grouped.py)",
    ),
    Avoided(
        name="weights-gathered-twice",
        fault="each of the two optimizers of a model with experts gathers the updated weights of both",
        last_broken="0.19.2",
        instead="each gathers its own (zoo/parallel/weight_gathering.py)",
    ),
    Avoided(
        name="mixed-dtypes-swap-states",
        fault="DistributedOptimizer counts a group's parameters as they come, and hands fp32 ones to the inner optimizer before the "
        "others: where dtypes are mixed, one parameter's range and state are taken for another's",
        last_broken="0.19.2",
        instead="places are counted anew (zoo/parallel/megatron/inner_optimizer.py)",
    ),
    Avoided(
        name="ddp-is-never-freed",
        fault="DistributedOptimizer keeps views of fp32 parameters that autograd knows, these keep the parameters' nodes, and a "
        "function that DDP has hung on each node keeps DDP: a circle that no garbage collector sees, so a model with its "
        "gradients and moments stays in memory for as long as the process lives",
        last_broken="0.19.2",
        instead="an engine that closes takes these functions away (zoo/training/optimization.py)",
    ),
)
