"""The checker's ranks: processes of this host with a deadline, and the stacks of those that wait.

The work of each rank is the run of one process, then the parallel one, both recorded.
"""

from __future__ import annotations

import copy
import dataclasses
import faulthandler
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.utils._pytree import tree_map

from . import recording
from .interface import Applied, DefinitionError, Finding
from .layouts import distance
from .recording import Recorder, is_floating

REQUIRED = ("build", "batch", "apply")
OTHER_SEED = 1000
ADAPTERS = ("lora", "adapter")
# Seconds that other ranks have once one has failed.
GRACE = 5.0
HIDDEN_FRAMES = ("/torch/", "opensora_sp/checker", "multiprocessing")

# The work of a process, and the folder where ranks write their stacks and modules. Arguments of a
# process that is forked need not be pickled, unlike the arguments of a call.
_started: list[Any] = []


@dataclasses.dataclass
class Trace:
    """A recorded run.

    Attributes:
        outputs: of all modules, in the order of the forward pass.
        results: numbers of ``step``.
        lowest: precision of the forward pass.
        gradients, inputs: gradients of parameters and of inputs; zeros where there is none.
    """

    outputs: dict[tuple[str, int], Tensor]
    results: dict[str, float]
    lowest: torch.dtype
    gradients: dict[str, Tensor]
    inputs: dict[str, Tensor]
    exchanges: list[recording.Exchange]

    @property
    def final(self) -> list[Tensor]:
        """Outputs of the model itself, of all its calls."""
        outputs = self.outputs.items()
        return [x for (name, _), x in outputs if name.split(" ")[0] == recording.OUTPUT]


@dataclasses.dataclass
class RankResult:
    """Results of a rank.

    Attributes:
        repeats: kind of finding -> largest relative difference to a repetition of the run.
        reference: one process.
        exact: one process in float64.
    """

    parallel: Trace
    applied: Applied
    repeats: dict[str, float]
    reference: Trace
    exact: Trace


@dataclasses.dataclass
class Work:
    """A definition or its file, and how ranks run it."""

    definition: Any
    ranks: int
    seed: int
    dtype: torch.dtype
    device: str
    seconds: float
    module_file: Path = Path()

    def run(self, rank: int, folder: str) -> RankResult:
        """Record one process and this rank; all ranks call it."""
        self.module_file = Path(folder, f"module{rank}")
        # Before there is a process group, which a model could ask for.
        model, reference, exact = self._run_alone()
        # NCCL refuses two ranks on one GPU.
        has_gpus = self.device == "cuda" and torch.cuda.device_count() >= self.ranks
        backend, store = "nccl" if has_gpus else "gloo", f"file://{folder}/store"
        # A rank that waits is to be found by the deadline.
        limit = timedelta(seconds=2 * self.seconds + 60)
        dist.init_process_group(backend, store, limit, self.ranks, rank)
        self._check_same(model)

        answer = self.definition.apply(model, dist.group.WORLD)
        applied = answer if isinstance(answer, Applied) else Applied(gradients=answer)
        model, applied.model = applied.model or model, None
        trace = self._trace(model, trains=True)
        return RankResult(trace, applied, self._repeat(model, trace, rank), reference, exact)

    def _run_alone(self) -> tuple[nn.Module, Trace, Trace]:
        """A model that has not run, and the traces of its copy in one process."""
        try:
            torch.manual_seed(self.seed)
            model = self.definition.build().to(self.device, self.dtype)
            alone = copy.deepcopy(model)
            trace = self._trace(alone, trains=True)
            other = self._trace(alone, seed=OTHER_SEED)
            work = dataclasses.replace(self, dtype=torch.float64)
            exact = work._trace(alone.double(), batch=self._batch(), trains=True)
        except Exception as error:
            raise DefinitionError(
                f"got {type(error).__name__} from the model in one process ({error}); expected "
                "build() and batch(seed) to run without parallelism; mend them"
            ) from error
        if apart(trace, other) > 0:
            raise DefinitionError(
                "got other outputs from the same weights and batch under another seed, in one "
                "process; expected a forward pass that draws no random numbers; call model.eval() "
                "in build(), or draw in batch(seed)"
            )
        return model, trace, exact

    def _check_same(self, model: nn.Module) -> None:
        """Raise DefinitionError on all ranks if weights or batches of ranks differ."""
        tensors = recording.tensors_of([model.state_dict(), self._batch()])
        digests = [recording.digest(tensor) for tensor in tensors]
        rank_digests = [digests] * self.ranks
        dist.all_gather_object(rank_digests, digests)
        for rank, others in enumerate(rank_digests):
            if others != rank_digests[0]:
                raise DefinitionError(
                    f"got other weights or another batch on rank {rank} than on rank 0; expected "
                    "the same on all ranks; make them from the seed alone, in build() and batch()"
                )

    def _batch(self) -> Any:
        torch.manual_seed(self.seed)
        return self._converted(dict(self.definition.batch(self.seed)))

    def _converted(self, batch: Any) -> Any:
        """A copy of the batch on the device and in the dtype of the run."""

        def converted(leaf: Any) -> Any:
            dtype = self.dtype if is_floating(leaf) else None
            return leaf.to(self.device, dtype, copy=True) if isinstance(leaf, Tensor) else leaf

        return tree_map(converted, batch)

    def _trace(
        self, model: nn.Module, *, seed: int = 0, batch: Any = None, trains: bool = False
    ) -> Trace:
        """Run the model once; ``trains``: with gradients."""
        batch = self._batch() if batch is None else self._converted(batch)
        leaves = {name: leaf for name, leaf in batch.items() if is_floating(leaf)}
        for leaf in leaves.values():
            leaf.requires_grad_(trains)
        model.zero_grad()
        torch.manual_seed(self.seed + seed)
        default, lifts = torch.get_default_dtype(), self.dtype == torch.float64
        # Of tensors that the model makes without a dtype.
        torch.set_default_dtype(torch.float64 if lifts else default)
        recorder = Recorder(self.module_file.write_text)
        with recorder, recorder.attached(model), recording.Lifted(lifts) as observed:
            results = self._step(model, batch, trains)
        torch.set_default_dtype(default)

        gradients = recording.gradients_of(model.named_parameters())
        inputs = recording.gradients_of(leaves.items())
        outputs, exchanges = recorder.outputs, recorder.exchanges
        trace = Trace(outputs, results, observed.lowest, gradients, inputs, exchanges)
        if not trace.final:
            raise ValueError("the model is not called, or returns no tensor")
        return trace

    def _step(self, model: nn.Module, batch: dict[str, Any], trains: bool) -> dict[str, float]:
        """The numbers of the definition's step, whose backward pass is run unless it has been."""
        step = getattr(self.definition, "step", None)
        if step is not None:
            results = step(model, batch)
        else:
            with torch.set_grad_enabled(trains):
                outputs = recording.tensors_of(model(**batch))
                # Of each element alone, so that it is the same for outputs that stay cut.
                results = {"loss": sum(output.double().sin().sum() for output in outputs)}

        if trains and all(parameter.grad is None for parameter in model.parameters()):
            results["loss"].backward()
        return {name: float(result) for name, result in results.items()} if step else {}

    def _repeat(self, model: nn.Module, trace: Trace, rank: int) -> dict[str, float]:
        """Run again under changes that must not change the output."""
        other = self._trace(model, seed=rank * OTHER_SEED)
        repeats = {"random": apart(trace, self._trace(model)), "seed": apart(trace, other)}
        batch, errors = self._batch(), [0.0]
        size = [*trace.final[0].shape, 1][0]
        for index in range(size):

            def sample(leaf: Any, index: int = index) -> Any:
                is_batch = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size
                return leaf[index : index + 1] if is_batch else leaf

            alone = self._trace(model, batch=tree_map(sample, batch))
            errors += map(distance, alone.final, map(sample, trace.final))
        repeats["batch"] = max(errors)

        # Last, since it is not undone.
        for name, parameter in model.named_parameters():
            if any(word in name.lower() for word in ADAPTERS):
                parameter.detach().zero_()
        repeats["adapter"] = apart(trace, self._trace(model))
        return repeats


def apart(trace: Trace, other: Trace) -> float:
    """The largest relative difference of two runs' final outputs and numbers."""
    got = [*other.final, *map(torch.tensor, other.results.values())]
    expected = [*trace.final, *map(torch.tensor, trace.results.values())]
    return max(map(distance, got, expected)) if len(got) == len(expected) else float("inf")


def run_ranks(work: Work) -> list[RankResult | Finding]:
    """Run the work on processes of this host.

    Raises:
        DefinitionError: of the first rank that raises it.
    """
    # A forked rank imports nothing again, such as this, which dispatch modes need.
    import_module("torch._dynamo")
    can_fork = sys.platform == "linux" and work.device == "cpu"
    context = multiprocessing.get_context("fork" if can_fork else "spawn")
    outcomes: dict[int, RankResult | Finding] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        # Left, it ends its processes, also those that wait.
        context.Pool(work.ranks, _started.extend, [(work, folder)]) as pool,
    ):
        answers = {rank: pool.apply_async(_run, [rank]) for rank in range(work.ranks)}
        deadline = time.monotonic() + work.seconds
        while len(outcomes) < work.ranks and time.monotonic() < deadline:
            time.sleep(0.02)
            for rank in [rank for rank, answer in answers.items() if answer.ready()]:
                outcomes[rank] = pickle.loads(answers.pop(rank).get())
                if isinstance(outcomes[rank], Finding):
                    deadline = min(deadline, time.monotonic() + GRACE)
        outcomes |= {rank: _waiting(rank, folder) for rank in answers}
    return [outcomes[rank] for rank in range(work.ranks)]


def _waiting(rank: int, folder: str) -> Finding:
    """Report where a rank waits."""
    try:
        stack_file = next(Path(folder).glob(f"{rank}.*"))
        os.kill(int(stack_file.suffix[1:]), signal.SIGUSR2)
    except (StopIteration, ProcessLookupError):
        return Finding("error", f"rank {rank} has not started, or was killed")
    time.sleep(0.3)
    lines = stack_file.read_text().splitlines()
    # The innermost frame, and those that are neither torch's nor the checker's.
    stack = "\n".join([*lines[1:2], *filter(_is_shown, lines[2:])])
    return Finding("waiting", f"rank {rank} waits:\n{stack}", _module(rank, folder))


def _is_shown(frame: str) -> bool:
    return not any(part in frame for part in HIDDEN_FRAMES)


def _module(rank: int, folder: str) -> str | None:
    """The last module whose forward pass the rank has entered."""
    file = Path(folder, f"module{rank}")
    return file.read_text() if file.exists() else None


def _run(rank: int) -> bytes:
    """The result of a rank, or the error that it raises, as bytes: torch would share the memory of
    each tensor by a file.
    """
    work, folder = _started
    # Open as long as the process lives.
    stack_file = Path(folder, f"{rank}.{os.getpid()}").open("w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, stack_file, all_threads=False)
    torch.set_num_threads(1)
    if work.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        _attention._context_parallel_buffers = _refuse_context_parallel
        _attention._enable_cp_dtensor_dispatcher = _refuse_context_parallel
    try:
        work.definition = load_definition(work.definition)
        return pickle.dumps(work.run(rank, folder))
    except DefinitionError:
        raise
    except Exception as error:
        frames = [*filter(_is_shown, traceback.format_tb(error.__traceback__))]
        text = f"rank {rank} raises {type(error).__name__}: {error}\n{''.join(frames[-1:])}"
        return pickle.dumps(Finding("error", text, _module(rank, folder)))


def load_definition(source: Any) -> Any:
    """The definition itself, or the module of a file, with all functions that are required.

    Raises:
        DefinitionError: if it has not, or if the file cannot be imported.
    """
    definition = source
    if isinstance(source, str | Path):
        # For modules in the same folder.
        sys.path.insert(0, str(Path(source).parent.resolve()))
        try:
            definition = SimpleNamespace(**runpy.run_path(str(source), run_name="definition"))
        except Exception as error:
            raise DefinitionError(
                f"got {type(error).__name__} from {source} ({error}); expected a Python file that "
                "can be imported; pass its path, or mend it"
            ) from error
    missing = [name for name in REQUIRED if not callable(getattr(definition, name, None))]
    if missing:
        raise DefinitionError(
            f"got a definition without {' and '.join(missing)} ({source}); expected build(), "
            "batch(seed) and apply(model, group), and optionally step(model, batch); add them"
        )
    return definition


def _refuse_context_parallel(*args: Any, **kwargs: Any) -> Any:
    raise DefinitionError(
        "got torch.distributed.tensor.experimental's context parallel on CPUs; expected a "
        "parallelism that runs there, as torch's needs the attention kernels of GPUs; check it "
        "with --device cuda"
    )
