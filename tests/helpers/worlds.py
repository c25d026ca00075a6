"""Many worlds in one call of ``run_ranks``, each a process group of its first ranks."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from opensora_sp.parallel import shutdown_process_group


def in_worlds(
    function: Callable[..., Any], cases: Iterable[tuple[int, tuple]], modules: Iterable[str] = ()
) -> list[Any]:
    """``[function(*args)]`` for each ``(world size, args)``; None where this rank has no part.

    To be called on every rank of ``ranks.run_ranks``, with as many ranks as the largest world. What
    the function imports is better named in ``modules``: collecting garbage after each world then
    passes over it.
    """
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()

    whole, store, rank = dist.get_world_size(), _get_default_store(), dist.get_rank()
    shutdown_process_group()

    results: list[Any] = []
    for number, (world, args) in enumerate(cases):
        results.append(None)
        if rank < world:
            os.environ["WORLD_SIZE"] = str(world)
            own = dist.PrefixStore(f"world {function.__name__} {number}", store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=world)
            results[-1] = function(*args)
            shutdown_process_group()  # the function may have left its world, then it does nothing

    own = dist.PrefixStore(f"after {function.__name__}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=whole)
    return results


TRAINING = (
    "opensora_sp.plugin",
    "opensora_sp.training.run",
    "tensorboard",
    "torch.utils.tensorboard",
)
