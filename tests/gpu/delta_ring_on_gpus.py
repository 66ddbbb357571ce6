"""One rank of a ring of GPUs: what its slice of a gated DeltaNet layer gives."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from highwater.engine.attention.registry import Attention
from highwater.engine.models.fused.delta_net import GatedDeltaNet
from highwater.engine.parallel.mesh import SequenceGroups
from highwater.engine.parallel.sequence_layout import PADDING, SequenceLayout

ROWS = {"one": (9001,), "packed": (5, 4098, 130, 2300, 700, 1), "a border": (4096, 4096)}
CONFIG = {
    "hidden_size": 512,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def main() -> None:
    folder = Path(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), world)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, device_id=device)
    found = {name: case(lengths, rank, world) for name, lengths in ROWS.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def case(lengths: tuple[int, ...], rank: int, world: int) -> dict[str, tuple[float, float]]:
    torch.manual_seed(0)
    exact = layer(torch.float64, None)
    x_SE = torch.randn(sum(lengths), CONFIG["hidden_size"], device="cuda").bfloat16()
    upstream_SE = torch.randn_like(x_SE)
    alone = layer(torch.bfloat16, None, exact)
    around = layer(torch.bfloat16, dist.group.WORLD, exact)

    whole = SequenceLayout(lengths)
    wanted = passes(exact, x_SE.double(), upstream_SE.double(), whole)
    single = passes(alone, x_SE, upstream_SE, whole)
    layout = SequenceLayout(lengths, ring_degree=world)
    positions_T = torch.from_numpy(layout.share_of(rank).positions_T).cuda()
    is_token_T = positions_T != PADDING

    def held(tensor_SE: Tensor) -> Tensor:
        return tensor_SE[positions_T] * is_token_T[:, None]

    mine = passes(around, held(x_SE), held(upstream_SE), layout)
    found: dict[str, tuple[float, float]] = {}
    for name, theirs in wanted.items():
        ours, one = mine[name], single[name]
        if name in ("output", "input"):
            of_rank = positions_T[is_token_T]
            ours, one, theirs = ours[is_token_T], one[of_rank], theirs[of_rank]
        else:  # a weight's gradient is the sum of the slices'
            ours = ours.float()
            dist.all_reduce(ours)
        found[name] = deviation(ours, theirs), deviation(one, theirs)
    return found


def layer(
    dtype: torch.dtype, ring: dist.ProcessGroup | None, like: GatedDeltaNet | None = None
) -> GatedDeltaNet:
    """A layer as a ring of all ranks has it, or one GPU; with the weights of another one."""
    theirs = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**CONFIG), 0).to("cuda", dtype)
    shared = SequenceGroups() if ring is None else SequenceGroups(ring, None, ring)
    ours = GatedDeltaNet(theirs, Attention("ring", set(), shared))
    if like is not None:
        ours.load_state_dict(like.state_dict())
    else:
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.copy_(torch.randn_like(parameter).bfloat16() / 8)
    return ours


def passes(
    layer: GatedDeltaNet, x_SE: Tensor, upstream_SE: Tensor, layout: SequenceLayout
) -> dict[str, Tensor]:
    x_SE = x_SE.detach().requires_grad_()
    output_SE = layer(x_SE[None], sequence_layout=layout)[0]
    names, parameters = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(output_SE, (x_SE, *parameters), upstream_SE)
    return dict(zip(("output", "input", *names), (output_SE, *gradients), strict=True))


def deviation(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected).norm() / expected.norm().clamp_min(1e-12))


if __name__ == "__main__":
    main()
