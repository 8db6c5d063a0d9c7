"""Which rows of a tensor a rank holds, and which layers are gathered together: FSDP's arithmetic in plain integers.

conv_out.weight, 4 rows, on 3 ranks          rows are cut as torch.chunk cuts them, so the last ranks
rank 0: rows 0 1   rank 1: rows 2 3          may hold fewer, or none
rank 2: nothing
"""

import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from common.errors import UsageError


def rows_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """(first, one past the last) of the rows that `rank` of `size` holds, of `rows` in all."""
    each = -(-rows // size)
    return min(rows, rank * each), min(rows, (rank + 1) * each)


def shard_of(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """[R, ...] -> this rank's rows, a view."""
    first, last = rows_of(whole.shape[0], rank, size)
    return whole[first:last]


def groups_of(unet: nn.Module) -> list[nn.Module]:
    """Modules that are gathered as one: each resnet, each transformer with all its blocks. The rest is the root's."""
    return [m for m in unet.modules() if isinstance(m, ResnetBlock2D | Transformer2DModel)]


def check_size(shard_size: int | None, world_size: int) -> None:
    """Raises UsageError for a --shard-size that does not divide the world, with those that do."""
    if shard_size and world_size % shard_size:
        works = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise UsageError(f"--shard-size {shard_size} does not divide {world_size} ranks: use {' or '.join(works)}")
