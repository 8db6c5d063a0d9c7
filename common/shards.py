"""Which rows of a tensor a rank holds, and which layers are gathered together: FSDP's arithmetic in plain integers.

conv_out.weight, 4 rows, on 3 ranks          rows are cut as torch.chunk cuts them, so the last ranks
rank 0: rows 0 1   rank 1: rows 2 3          may hold fewer, or none
rank 2: nothing
"""

import math
from dataclasses import dataclass

import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from common.errors import UsageError
from common.models import ModelSpec, empty_unet


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


@dataclass(frozen=True)
class Group:
    """What is gathered at once: names and shapes of its parameters."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    is_root: bool

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def padded(self, size: int) -> int:
        """Elements on the wire: every tensor is filled up until its rows divide evenly over `size` ranks."""
        return sum(-(-rows // size) * size * math.prod(rest) for rows, *rest in self.shapes)


def groups_of_spec(spec: ModelSpec) -> list[Group]:
    """The groups of a model in the order of the network, the root first."""
    unet = empty_unet(spec)
    names = {module: name for name, module in unet.named_modules()}
    paths = [names[module] for module in groups_of(unet)]
    shapes: dict[str, list] = {path: [] for path in ("", *paths)}
    for name, p in unet.named_parameters():
        owner = next((path for path in paths if name.startswith(f"{path}.")), "")
        shapes[owner].append(tuple(p.shape))
    return [Group(path, tuple(found), path == "") for path, found in shapes.items()]


def check_size(shard_size: int | None, world_size: int) -> None:
    """Raises UsageError for a --shard-size that does not divide the world, with those that do."""
    if shard_size and world_size % shard_size:
        works = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise UsageError(f"--shard-size {shard_size} does not divide {world_size} ranks: use {' or '.join(works)}")
