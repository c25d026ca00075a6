"""The Booster plugin: a dp x sp mesh, the wrapped model, ZeRO over the world, data per replica."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from opensora_sp.checkpoint.zero_shards import NamedShards
from opensora_sp.parallel import Options, SequenceMesh, parallelize
from opensora_sp.parallel.agreement import check_same_model
from opensora_sp.parallel.mesh import SequenceSize
from opensora_sp.runtime.cost_models import cost_model_of

from ._colossalai import (
    DistributedOptim,
    LowLevelZeroModel,
    LowLevelZeroPlugin,
    ModelWrapper,
    OptimizerWrapper,
    cast_to_distributed,
    get_accelerator,
)
from .checkpoint_io import NamedCheckpointIO
from .local_gradients import AccumulatingZeroOptimizer
from .process_group import current_device, use_cpu_if_nothing_else
from .zero_optimizer import SequenceZeroOptimizer

Boosted = tuple[nn.Module, OptimizerWrapper, Callable[..., Any], DataLoader[Any], Any]


class SequenceParallelPlugin(LowLevelZeroPlugin):
    """ColossalAI's ``LowLevelZeroPlugin`` with sequence parallelism.

    The processes form ``world / sp_size`` replicas of ``sp_size`` ranks. The ranks of a replica
    work on the same batches and hold a part of their tokens each; ZeRO shards and averages over the
    whole world. With ``sp_size="auto"`` they form the nested groups of ``SequenceMesh``, and each
    micro-batch runs in ``plugin.mesh.using(group)``. Create it on every rank, after the process
    group (``colossalai.launch_from_torch`` or ``torch.distributed``).

    Args:
        sp_size: ranks that share a batch, which must divide the number of processes, or "auto".
        stage: ZeRO stage, 1 or 2.
        precision: "fp32", "bf16", or on CUDA "fp16". Master weights and moments are fp32.
        max_norm: gradients are clipped to this global norm; 0 turns clipping off.
        cast_inputs: cast floating-point inputs of the model to ``precision``. Off by default: the
            models of this package cast what they compute on themselves, and a timestep rounded to
            bf16 is another timestep.
        overlap_communication: reduce gradients while backward runs, on CUDA, where it exists, and
            without ``accumulate_locally``.
        accumulate_locally: sum gradients on each rank, in fp32, and reduce them once, in ``step``.
            Ranks may then run different numbers of backward passes, or none; see
            ``AccumulatingZeroOptimizer``. It takes 4 bytes per trainable parameter on each rank.
        initial_scale: loss scale that fp16 starts with.
        sequence_parallel: how the ranks of a replica share a batch: fields of
            ``opensora_sp.parallel.Options`` by name.
        allow_pickle: let ``Booster.load_model`` read pickled weights; see ``NamedCheckpointIO``.
        options: further arguments of ``LowLevelZeroPlugin``.

    Raises:
        ValueError: if ``sp_size`` does not divide the world, or stage, precision and device do not
            fit.
    """

    def __init__(
        self,
        sp_size: SequenceSize = 1,
        stage: int = 2,
        precision: str = "bf16",
        max_norm: float = 0.0,
        *,
        cast_inputs: bool = False,
        overlap_communication: bool = True,
        accumulate_locally: bool = False,
        initial_scale: float = 2**16,
        sequence_parallel: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
        **options: Any,
    ) -> None:
        use_cpu_if_nothing_else()
        on_cuda = get_accelerator().name == "cuda"
        _check_arguments(stage, precision, on_cuda)
        overlap_communication = overlap_communication and on_cuda and not accumulate_locally

        self.sequence_parallel = Options(**(sequence_parallel or {}))
        self.mesh = SequenceMesh(sp_size)
        self.accumulate_locally = accumulate_locally
        self.allow_pickle = allow_pickle

        name = type(self).__name__
        super().__init__(
            stage=stage,
            precision=precision,
            max_norm=max_norm,
            cast_inputs=cast_inputs,
            overlap_communication=overlap_communication,
            initial_scale=initial_scale,
            **options,
        )
        # ColossalAI renames the class.
        type(self).__name__ = name

    @classmethod
    def from_config(cls, cfg: Any) -> SequenceParallelPlugin:
        """Build from a config's ``sp_size``, ``zero_stage``, ``overlap_communication``,
        ``precision``, ``grad_clip``, ``cost_model`` and ``sequence_parallel``.

        Args:
            cfg: a checked training config, or any object with some of these attributes, such as an
                mmengine ``Config``; what it lacks has defaults.
        """
        sp_size = getattr(cfg, "sp_size", 1)
        return cls(
            # Degrees of buckets are a matter of the schedule.
            sp_size="auto" if isinstance(sp_size, Mapping) else sp_size,
            stage=getattr(cfg, "zero_stage", 2),
            precision=getattr(cfg, "precision", "bf16"),
            max_norm=getattr(cfg, "grad_clip", 0.0),
            overlap_communication=getattr(cfg, "overlap_communication", True),
            accumulate_locally=getattr(cfg, "accumulates_locally", False),
            sequence_parallel={
                **dict(getattr(cfg, "sequence_parallel", None) or {}),
                "cost_model": cost_model_of(getattr(cfg, "cost_model", None)),
            },
        )

    def supported_devices(self) -> list[str]:
        return ["cuda", "npu", "cpu"]

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Wrap the model and the optimizer for ``Booster.boost``."""
        # Before anything that one rank alone would refuse.
        check_same_model(model, current_device())

        bare_optimizer = None if isinstance(optimizer, OptimizerWrapper) else optimizer
        if bare_optimizer is not None:
            # Before parallelize: what this refuses leaves the model as it was.
            self._keep_trainable(model, bare_optimizer)

        needs_hooks = self.mesh.shares_batches or hasattr(model, "sharding_points")
        if needs_hooks and not isinstance(model, ModelWrapper):
            parallelize(_without_peft(model), self.mesh, self.sequence_parallel)

        if bare_optimizer is not None:
            wrapped: Any = self._with_zero(model, bare_optimizer)
            return *wrapped, criterion, dataloader, lr_scheduler
        boosted: Boosted = super().configure(model, optimizer, criterion, dataloader, lr_scheduler)
        return boosted

    def _with_zero(
        self, module: nn.Module, bare_optimizer: Optimizer
    ) -> tuple[LowLevelZeroModel, SequenceZeroOptimizer]:
        """Both wrappers of ZeRO. ``super().configure`` would build ``LowLevelZeroOptimizer``."""
        fp32_shards = self._fp32_shards(module)
        model = LowLevelZeroModel(
            module,
            self.precision,
            overlap_allgather=self.zero_optim_kwargs["overlap_allgather"],
            cast_inputs=self.cast_inputs,
            use_fp8=self.use_fp8,
        )
        kind = AccumulatingZeroOptimizer if self.accumulate_locally else SequenceZeroOptimizer
        optimizer = kind(
            bare_optimizer,
            **self.zero_optim_kwargs,
            verbose=self.verbose,
            backward_context=model._hook_context,
        )

        model.update_master_params = MethodType(optimizer.update_master_params, model)
        _restore_fp32(optimizer, fp32_shards)
        model.shards = optimizer.shards = NamedShards(model.unwrap(), optimizer)
        return model, optimizer

    def _keep_trainable(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Check an optimizer, and remove frozen parameters from it."""
        if isinstance(cast_to_distributed(optimizer), DistributedOptim):
            raise ValueError(
                f"got optimizer {type(optimizer).__name__}, which ColossalAI replaces by a "
                "distributed one; expected an elementwise optimizer such as torch.optim.AdamW; "
                "choose another optimizer"
            )
        if self.lora_enabled:
            # As super().configure does, which must not see a model that is already wrapped.
            self.add_lora_params_to_optimizer(model, optimizer)

        for number, group in enumerate(optimizer.param_groups):
            trainable = [p for p in group["params"] if p.requires_grad]
            # ColossalAI takes its dtype from the first parameter, frozen or not.
            if number == 0 and not trainable:
                raise ValueError(
                    f"got an optimizer whose first of {len(optimizer.param_groups)} parameter "
                    "groups holds no trainable parameter; expected one there; leave groups of "
                    "frozen parameters out, or put them last"
                )
            group["params"] = trainable

    def get_checkpoint_io(self) -> NamedCheckpointIO:
        return NamedCheckpointIO(allow_pickle=self.allow_pickle)

    def support_no_sync(self) -> bool:
        return self.stage == 1 or self.accumulate_locally

    def no_sync(
        self, model: nn.Module, optimizer: OptimizerWrapper
    ) -> AbstractContextManager[None]:
        """Accumulate the gradients of micro-batches locally, without communication.

        Inside, ``step`` does nothing. With ``accumulate_locally`` all backward passes accumulate
        so, inside and outside.

        Raises:
            ValueError: at stage 2 without ``accumulate_locally``: gradients are sharded after every
                backward.
        """
        if not self.support_no_sync():
            raise ValueError(
                "got no_sync at ZeRO stage 2, which shards gradients after every backward; "
                "expected stage 1; leave no_sync out (gradients of several backward passes are "
                "summed anyway), or set accumulate_locally=True or stage=1"
            )
        accumulating: AbstractContextManager[None] = optimizer.no_sync()
        return accumulating

    def _fp32_shards(self, model: nn.Module) -> dict[int, torch.Tensor]:
        """This rank's shard of each trainable parameter, by id, as before the cast."""
        if self.precision == "fp32":
            return {}

        world, rank = dist.get_world_size(), dist.get_rank()
        shards = {}
        for p in model.parameters():
            if p.requires_grad:
                size = -(-p.numel() // world)
                shard = p.detach().flatten()[rank * size : (rank + 1) * size]
                shards[id(p)] = shard.float().clone()
        return shards

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type | None = None,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """A loader that gives the ranks of one replica the same batches, and each replica its own.
        With ``sp_size="auto"`` the world is one replica.

        ``seed`` sets the sampler, the loader's generator and the workers. All three agree between
        the ranks of a replica; replicas and workers differ. With ``num_workers=0`` a data set that
        draws from global generators uses generators of the process, which ``launch`` seeds alike
        on all ranks.

        Raises:
            ValueError: if there is not even one batch.
        """
        sampler_cls = distributed_sampler_cls or DistributedSampler
        sampler = sampler_cls(
            dataset,
            num_replicas=self.mesh.dp_size,
            rank=self.mesh.dp_rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

        batches = len(sampler) // batch_size if drop_last else -(-len(sampler) // batch_size)
        if batches == 0:
            num_samples = len(dataset)  # type: ignore[arg-type]
            raise ValueError(
                f"got {num_samples} samples for {self.mesh.dp_size} replicas and batch_size "
                f"{batch_size}, not one batch each; expected at least that; add samples, lower "
                "batch_size, or set drop_last=False"
            )

        replica_seed = int(np.random.SeedSequence([seed, self.mesh.dp_rank]).generate_state(1)[0])
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            worker_init_fn=_seed_worker,
            generator=torch.Generator().manual_seed(replica_seed),
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            **kwargs,
        )


def _restore_fp32(optimizer: SequenceZeroOptimizer, fp32_shards: dict[int, torch.Tensor]) -> None:
    """Set the fp32 master weights, which ColossalAI copies from rounded weights."""
    shards = optimizer.get_working_to_master_map()
    for key, part in fp32_shards.items():
        if key in shards and shards[key].dtype == torch.float32:
            shards[key][: part.numel()].copy_(part)


def _without_peft(model: Any) -> nn.Module:
    """The model itself, with its LoRA layers."""
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


def _seed_worker(worker: int) -> None:
    """Seed numpy and random from torch's seed of the worker."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def _check_arguments(stage: int, precision: str, on_cuda: bool) -> None:
    if stage not in (1, 2):
        raise ValueError(f"got ZeRO stage {stage}; expected 1 or 2; choose one of these")

    if precision not in ("fp32", "bf16", "fp16"):
        raise ValueError(
            f"got precision {precision!r}; expected 'fp32', 'bf16' or 'fp16'; choose one of these"
        )
    if precision == "fp16" and not on_cuda:
        raise ValueError(
            "got precision 'fp16' on CPU; expected 'fp32' or 'bf16' there; fp16 training needs CUDA"
        )
