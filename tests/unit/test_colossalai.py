"""What the plugin uses of ColossalAI 0.5.0 beside its documented interface, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from opensora_sp.plugin import _colossalai as colossalai


def parameters(function: Callable) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_version_that_all_this_was_read_in() -> None:
    assert colossalai.colossalai.__version__ == "0.5.0"


def test_zero_is_what_the_optimizer_overrides() -> None:
    zero = colossalai.LowLevelZeroOptimizer
    assert parameters(zero._sanity_checks) == []
    assert parameters(zero._unscale_and_clip_grads) == ["grad_groups_flat", "total_norm"]
    assert parameters(zero._run_reduction) == [] and parameters(zero._reduce_grad) == [
        "partition_grad"
    ]
    assert parameters(zero._add_to_bucket) == ["param", "group_id"]
    assert parameters(zero.no_sync) == [] and parameters(zero.get_grad_norm)[0] == "norm_type"
    assert {"get_working_to_master_map", "update_master_params"} <= set(dir(zero))
    assert parameters(zero.get_working_grads_by_group_id) == ["group_id"]
    assert parameters(zero.get_working_grad_by_param_id) == ["param_id"]

    source = inspect.getsource(zero)
    used = (
        "_current_grad_norm",
        "mixed_precision_mixin",
        "_dtype",
        "_overlap_communication",
        "_overlap_allgather",
        "_fp8_communication",
        "_cpu_offload",
        "_clip_grad_norm",
        "_reduce_bucket_size",
        "require_grad_sync",
    )

    for name in (f"self.{name}" for name in (*used, "optim.step()", "pg_to_bucket_store")):
        assert name in source, name
    # The average that the collectives are made for.
    assert "flat_grads /= bucket_store.world_size" in source
    assert (
        'self.optim.param_groups[group_id]["params"] = self._master_param_groups_of_current_rank'
        in source
    )


def test_master_weights_are_linked_where_ours_replace_them() -> None:
    zero = colossalai.LowLevelZeroOptimizer
    assert parameters(zero._create_master_param_current_rank) == ["param_list"]
    assert parameters(zero.link_master_and_working_param) == ["master_param", "working_param"]
    created = inspect.getsource(zero._create_master_param_current_rank)
    for name in (
        "self._working_param_to_padded_working_param[param] = padding_param",
        "self._master_weights is True",
        "self.link_master_and_working_param(splited_param_current_rank, param)",
    ):
        assert name in created, name
    init = inspect.getsource(zero.__init__)
    assert "self._working_param_groups[group_id] = group_params" in init
    assert 'param_group["params"] = master_param_current_rank' in init


def test_the_loss_scale_has_the_rule_and_the_calls_that_ours_has() -> None:
    from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler
    from colossalai.amp.naive_amp.mixed_precision_mixin import FP16MixedPrecisionMixin

    from opensora_sp.plugin.loss_scale import LossScale

    source = inspect.getsource(DynamicGradScaler)
    for name in ("growth_factor", "backoff_factor", "growth_interval", "hysteresis"):
        assert f"self._{name}" in source, name
    for name in ("self._min_scale", "self._max_scale", "_growth_step", "_hysteresis_step"):
        assert name in source, name
    assert "self.grad_scaler" in inspect.getsource(FP16MixedPrecisionMixin)
    assert colossalai.MixedPrecisionMixin.__abstractmethods__ <= set(vars(LossScale))


def test_reductions_run_on_a_stream_that_the_host_waits_for_after_them() -> None:
    zero = inspect.getsource(colossalai.LowLevelZeroOptimizer)
    assert "stream = bucket_store.comm_stream" in inspect.getsource(
        colossalai.LowLevelZeroOptimizer._run_reduction
    )
    assert zero.index("self._reduce_grad(self._partition_grads)") < zero.index(
        "get_accelerator().synchronize()"
    )
    assert zero.index("self.optim.step()") < zero.index(
        "all_gather_into_flat_tensor_nd(padded_working_param"
    )


def test_gradients_of_a_group_are_this_ranks() -> None:
    from colossalai.zero.low_level.bookkeeping import GradientStore

    assert parameters(GradientStore.get_working_grads_by_group_id) == ["group_id"]
    assert "_working_index" in inspect.getsource(GradientStore.get_working_grads_by_group_id)


def test_the_plugin_is_what_ours_extends() -> None:
    plugin, model = colossalai.LowLevelZeroPlugin, colossalai.LowLevelZeroModel
    assert parameters(plugin.configure) == [
        "model",
        "optimizer",
        "criterion",
        "dataloader",
        "lr_scheduler",
    ]
    assert parameters(plugin.add_lora_params_to_optimizer) == ["model", "optimizer"]
    assert parameters(plugin.no_sync) == ["model", "optimizer"]

    wanted = ["module", "precision", "overlap_allgather", "cast_inputs", "use_fp8"]
    assert parameters(model.__init__) == wanted
    assert {"_hook_context", "_force_wait_all_gather", "unwrap"} <= set(dir(model))

    source = inspect.getsource(plugin.__init__)
    for name in (
        "self.zero_optim_kwargs",
        "self.lora_enabled",
        "self.cast_inputs",
        "self.use_fp8",
        "self.verbose",
    ):
        assert name in source, name

    assert 'setattr(self.__class__, "__name__"' in source  # when this goes, so can our repair


def test_the_checkpoint_interface_has_the_methods_that_ours_has() -> None:
    from opensora_sp.plugin.checkpoint_io import NamedCheckpointIO

    for kind in ("model", "optimizer"):
        for verb in ("save", "load"):
            for form in ("sharded", "unsharded"):
                name = f"{verb}_{form}_{kind}"
                assert name in vars(NamedCheckpointIO), name
                theirs = parameters(getattr(colossalai.LowLevelZeroCheckpointIO, name))
                if verb == "load":
                    # Passed by position. Ours are the same function for a file and for an index.
                    theirs[1] = "checkpoint"
                ours = parameters(getattr(NamedCheckpointIO, name))
                named = [p for p in ours if p not in ("args", "kwargs")]
                assert named == theirs[: len(named)], name
    for name in ("save_lr_scheduler", "load_lr_scheduler", "save_lora_as_pretrained", "_sync_io"):
        assert name in vars(NamedCheckpointIO) and hasattr(
            colossalai.LowLevelZeroCheckpointIO, name
        ), name


def test_the_accelerator_has_the_calls_that_ours_replaces() -> None:
    from opensora_sp.plugin.process_group import GlooCpuAccelerator

    replaced = [name for name in vars(GlooCpuAccelerator) if not name.startswith("_")]
    assert len(replaced) >= 9
    for name in replaced:
        assert hasattr(colossalai.CpuAccelerator, name), name


def test_the_meta_kernels_are_those_of_torch() -> None:
    """The planner's trace needs the backward pass of a layer norm without an affine part."""
    x = torch.empty(2, 3, 4, device="meta", requires_grad=True)
    torch.nn.functional.layer_norm(x, (4,)).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
