"""One rank of two under gloo: loads a tiny checkpoint with TP 2 and exports it again. Arguments: rank, store, source, target."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the package `support`

import bridge_fakes as fakes
import torch
import torch.distributed as dist

from zoo.bridge import ShardInfo, TorchComm, export_hf, load_hf
from zoo.bridges.qwen3_omni import BRIDGE


def main(rank: int, store: str, source: Path, target: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = dist.group.WORLD
    info = ShardInfo(tp_rank=rank, tp_size=2, etp_rank=rank, etp_size=2)
    state = torch.load(source / "state.pt")  # only the names and shapes are used
    chunk = fakes.build_chunk(state, info)
    load_hf([chunk], source, BRIDGE, fakes.DIMS, info)
    comm = TorchComm({"tp": world, "etp": world})
    export_hf([chunk], target, BRIDGE, fakes.DIMS, info, comm, config={"model_type": "qwen3_omni_moe"})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
