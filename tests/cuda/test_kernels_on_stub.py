"""Triton kernels under the stub of CUDA: what is launched. Values there are none, so tests set
which kernels run: "triton" to record them, "torch" to record the reference."""

import pytest
import torch
from cuda_cases import cache
from cuda_stub import join, phase, requires_stub, run_on_stub
from runs import TRAIN, write_toy_set

from opensora_sp import device_verification
from opensora_sp.config import load_train_config
from opensora_sp.models.kernels import set_kernels

pytestmark = [requires_stub, pytest.mark.slow]

NO_EPILOGUE, GELU_BIAS = 1, 36  # cublasLtEpilogue_t


def linear_gelu_without_gradients():
    """In 16 bits, with no token, in fp32, with weights in fp32 under autocast; with gradients."""
    from opensora_sp.models.kernels.fused import linear_gelu

    set_kernels("triton")
    x, weight, bias = (
        torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((2, 6, 72), (144, 72), (144,))
    )
    cases = {
        "bf16": (x, weight, bias),
        "empty": (x[:, :0], weight, bias),
        "fp32": (x.float(), weight.float(), bias.float()),
        "autocast": (x.float(), weight.float(), bias.float()),
    }
    shapes = []
    for name, arguments in cases.items():
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=name == "autocast"):
            phase(name)
            shapes.append(tuple(linear_gelu(*arguments).shape))
    phase("gradients")
    linear_gelu(x, weight, bias.requires_grad_())
    phase("end")
    return tuple(shapes)


def test_gelu_goes_into_the_product_where_nothing_is_kept_for_backward():
    recording = run_on_stub(linear_gelu_without_gradients, env=cache())
    assert recording.result == ((2, 6, 144), (2, 0, 144), (2, 6, 144), (2, 6, 144))

    (product,) = recording.in_phase("bf16").gemms
    assert (product.call, product.epilogue) == ("cublasLtMatmul", GELU_BIAS)
    assert not recording.in_phase("bf16").launches
    assert not recording.in_phase("empty").gemms and not recording.in_phase("empty").launches
    for name in ("fp32", "autocast", "gradients"):
        (product,) = recording.in_phase(name).gemms
        assert product.epilogue == NO_EPILOGUE
        assert recording.in_phase(name).kernels()["_gelu_kernel"] == 1


def train(config, setting):
    """A step with each of the kernels set; verification, which has no values here, is left out."""
    from opensora_sp.plugin import current_device
    from opensora_sp.training.preflight import preflight
    from opensora_sp.training.trainer import Trainer

    device_verification.verify_kernel = lambda *args: []
    join(world=2)
    options = ["precision=bf16", "num_workers=0", f"kernels={setting}"]
    cfg = load_train_config(config, options)
    run = Trainer(cfg, *preflight(cfg, None, None), current_device())
    phase("step")
    run.step.run(0, next(iter(run.loader)), None)
    phase("end")


@pytest.mark.parametrize("setting", ["torch", "triton"])
def test_a_step_of_training_launches_the_kernels_of_its_config(setting, tmp_path):
    manifest = write_toy_set(tmp_path / "clips", 12)
    config = tmp_path / "train.py"
    config.write_text(TRAIN.format(manifest=str(manifest)) + f'outputs = "{tmp_path}/out"\n')
    ranks = dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    ranks |= dict(MASTER_ADDR="localhost", MASTER_PORT="1")
    env = cache() | ranks | {"XDG_CACHE_HOME": str(tmp_path)}

    recording = run_on_stub(train, str(config), setting, env=env, timeout=500)
    names = {launch.name for launch in recording.in_phase("step").launches}
    own = [name for name in names if name.isidentifier() and name.endswith("kernel")]
    assert bool(own) == (setting == "triton"), names
