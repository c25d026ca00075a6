"""The engine of full attention: a ``TokenPlan`` carried out in a model that is not edited.

Each rank holds a range of the tokens of every sample, of any length. Queries, keys and values
change from ranges of tokens to ranges of the heads of all samples in one exchange, and the output
comes back: 4 u, as in DeepSpeed-Ulysses (Jacobs et al., 2023), for any numbers of tokens and heads.
After the exchange the tokens are in the order of the ranks, which no attention without an L x L
mask depends on.

Calls of ``scaled_dot_product_attention``, and of diffusers' dispatch, are caught while a module
of ``TokenPlan.attention`` runs. Which streams a query has (of video, of text, or both) follows from
its length on all ranks, which they compare once for each call.

Legend: B samples, L tokens, H heads, D channels of a head, n heads of all samples held.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from opensora_sp.common.graphs import uncompiled

from .collectives import exchange, gather_rows
from .engine import Attachment, ForwardPoint, SequenceParallel
from .layout import ExchangePlan, balanced_range, balanced_sizes, plan_heads
from .shard_plan import find_modules
from .token_plan import CONTEXT, Cut, TokenPlan
from .typed import is_backward_running

# Called with q, k, v ``[B, L, H, D]`` and a mask; returns ``[B, L, H, D]``.
Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
Streams: TypeAlias = tuple[str, ...]

DISPATCH = "dispatch_attention_fn"


@dataclass
class _Pass:
    """One forward pass: the lengths of its streams, and what was cut, attended to and gathered."""

    lengths: dict[str, int] = field(default_factory=dict)
    is_cut: bool = False
    made: set[tuple[str, str | int]] = field(default_factory=set)
    attended: set[nn.Module] = field(default_factory=set)
    # By the identity of the whole tensor, which is kept so that it stays its own.
    pieces: dict[tuple[int, Cut], tuple[Tensor, Tensor]] = field(default_factory=dict)
    masks: dict[tuple[int, ...], tuple[Any, Tensor]] = field(default_factory=dict)


@dataclass
class _Call:
    """A call of a module that attends: its arguments, and the attentions it has computed."""

    module: nn.Module
    arguments: dict[str, Any]
    attend: Callable[[_Call, Attention, Tensor, Tensor, Tensor, Tensor | None], Tensor]
    count: int = 0


# The innermost call is the last; None while its attention runs.
_calls: list[_Call | None] = []


@contextmanager
def _calling(call: _Call | None) -> Iterator[None]:
    _calls.append(call)
    try:
        yield
    finally:
        _calls.pop()


class TokenPoints:
    """The points of a model with a ``TokenPlan``, and the functions to attach there."""

    def __init__(self, engine: SequenceParallel) -> None:
        self.engine, self.model, self.mesh = engine, engine.model, engine.mesh
        assert isinstance(engine.plan, TokenPlan)
        self.plan: TokenPlan = engine.plan
        self.names: dict[nn.Module, str] = {m: name for name, m in self.model.named_modules()}
        self.contexts: dict[nn.Module, str] = {}
        for pattern, stream in self.plan.contexts.items():
            self.contexts |= dict.fromkeys(find_modules(self.model, pattern), stream)
        self._pass = _Pass()
        # Streams of the queries of each call, by module and number of the call.
        self._streams: dict[tuple[nn.Module, Any], Streams] = {}
        self._is_checked = False

    def attachments(self) -> list[Attachment]:
        """Each point with the function to attach, the innermost function of a module first."""
        functions: list[tuple[str, Callable[..., Any]]] = [
            *((pattern, self._attend) for pattern in self.plan.attention),
            *((pattern, partial(self._cut_outputs, pattern)) for pattern in self.plan.outputs),
            # The last attached is the first to run: cuts are made in the order of the plan.
            *((pattern, partial(self._cut_inputs, pattern)) for pattern in reversed(self.plan.inputs)),
            *((pattern, partial(self._gather, pattern)) for pattern in self.plan.gather),
        ]
        points: list[Attachment] = []
        for pattern, function in functions:
            for module in [self.model] if pattern == "" else find_modules(self.model, pattern):
                points.append((ForwardPoint(module), partial(self._call, function, module)))
        for module in {point.module for point, _ in points}:
            _catch_dispatch(module)
        return [*points, (ForwardPoint(self.model), self._forward)]

    def _call(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        forward: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call the function with the bound arguments; the bare module in a group of one rank."""
        if self.mesh.sp_size == 1:
            return forward(*args, **kwargs)
        return function(module, forward, inspect.signature(forward).bind(*args, **kwargs))

    def _forward(
        self, forward: Callable[..., Any], /, *args: Any, output: str = "full", **kwargs: Any
    ) -> Any:
        """Run the model; in the first pass all that the plan names has to happen."""
        if self.mesh.sp_size == 1:
            return forward(*args, **kwargs)
        self._pass, self._output = _Pass(), output
        if self._is_checked:
            return forward(*args, **kwargs)
        with _Catch(self._refuse_attention):
            result = forward(*args, **kwargs)
        self._check_made()
        self._is_checked = True
        return result

    # Cuts and gathers.

    def _cut_inputs(
        self, pattern: str, module: nn.Module, forward: Any, bound: inspect.BoundArguments
    ) -> Any:
        for name, cut in self.plan.inputs[pattern].items():
            self._pass.made.add((pattern, name))
            if bound.arguments.get(name) is not None:
                piece = self._cut(bound.arguments[name], cut, name)
                bound.arguments[name] = piece
        return forward(*bound.args, **bound.kwargs)

    def _cut_outputs(
        self, pattern: str, module: nn.Module, forward: Any, bound: inspect.BoundArguments
    ) -> Any:
        outputs = forward(*bound.args, **bound.kwargs)
        pieces = [*outputs] if isinstance(outputs, tuple | list) else [outputs]
        for index, cut in self.plan.outputs[pattern].items():
            self._pass.made.add((pattern, index))
            pieces[index] = self._cut(pieces[index], cut, None)
        return type(outputs)(pieces) if isinstance(outputs, tuple | list) else pieces[0]

    def _cut(self, whole: Any, cut: Cut, name: str | None) -> Any:
        """The tokens of this rank; of a tuple, such as a pair of rotary tables, of each."""
        if isinstance(whole, tuple | list):
            return type(whole)(self._cut(part, cut, name) for part in whole)
        if cut.ndim is not None and whole.ndim < cut.ndim:
            return whole
        if cut.ndim is not None and whole.ndim > cut.ndim:
            raise ValueError(
                f"got {name!r} of shape {tuple(whole.shape)}; expected {cut.ndim} axes, of which "
                f"axis {cut.axis} has the tokens; correct the TokenPlan"
            )

        now = self._pass
        length = whole.shape[cut.axis]
        if name in self.plan.streams:
            now.lengths[name] = length
            now.is_cut = True
        elif length == 1:
            # The same for all tokens.
            return whole
        key = id(whole), cut
        if key not in now.pieces:
            lengths = [now.lengths[stream] for stream in cut.streams] or [length]
            if sum(lengths) != length:
                raise ValueError(
                    f"got {name!r} with {length} tokens; expected those of {cut.streams}, "
                    f"{lengths}; correct the TokenPlan"
                )
            parts = [self._part(part, cut.axis) for part in whole.split(lengths, cut.axis)]
            piece = parts[0] if len(parts) == 1 else torch.cat(parts, cut.axis)
            if whole.requires_grad:
                return piece
            now.pieces[key] = whole, piece
        return now.pieces[key][1]

    def _part(self, stream: Tensor, axis: int) -> Tensor:
        length = stream.shape[axis]
        start, stop = balanced_range(length, self.mesh.sp_size, self.mesh.sp_rank)
        if start == stop and length:
            # A made-up token, since modules of any kind need not accept none.
            start = min(start, length - 1)
            stop = start + 1
        return stream.narrow(axis, start, stop - start)

    def _gather(
        self, pattern: str, module: nn.Module, forward: Any, bound: inspect.BoundArguments
    ) -> Any:
        outputs = forward(*bound.args, **bound.kwargs)
        now = self._pass
        now.is_cut = False
        if self._output == "shards":
            return outputs
        axes = self.plan.gather[pattern]
        parts = [*outputs] if isinstance(outputs, tuple | list) else [outputs]
        for i, axis in enumerate(axes):
            if axis is not None:
                streams = self._streams_of(module, ("output", i), parts[i].shape[axis])
                parts[i] = self._whole(parts[i], axis, streams, kind="gather")
                if parts[i].requires_grad:
                    parts[i].register_hook(partial(self._resume, now))
        return type(outputs)(parts) if isinstance(outputs, tuple | list) else parts[0]

    def _resume(self, earlier: _Pass, grad: Tensor) -> None:
        # Its blocks may be recomputed now.
        self._pass = earlier

    def _whole(self, part: Tensor, axis: int, streams: Streams, *, kind: str) -> Tensor:
        """All ranks' tokens, in the order of the ranks."""
        rows = self._real(part, axis, streams).movedim(axis, 0).contiguous()
        counts = self._counts(streams)
        return gather_rows(rows, counts, self.mesh.sp_group, kind=kind).movedim(0, axis)

    # Attention.

    @uncompiled
    def _attend(self, module: nn.Module, forward: Any, bound: inspect.BoundArguments) -> Any:
        """Run a module that attends, with its attention distributed."""
        now = self._pass
        if not is_backward_running() and now.is_cut:
            now.attended.add(module)
        if module not in now.attended:
            # Before the cut, such as of a text refiner.
            return forward(*bound.args, **bound.kwargs)
        call = _Call(module, bound.arguments, self._distribute)
        with _calling(call), _Catch(_caught):
            output = forward(*bound.args, **bound.kwargs)
        if call.count == 0:
            raise ValueError(
                f"got {self.names[module]!r}, which computes no attention that can be caught; "
                "expected scaled_dot_product_attention, or diffusers' dispatch; set such a "
                "processor, or leave the module out of the TokenPlan"
            )
        return output

    def _distribute(
        self,
        call: _Call,
        attention: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """One attention: q, k, v ``[B, L, H, D]`` of the tokens of this rank."""
        streams = self._streams_of(call.module, call.count, q.shape[1])
        call.count += 1
        context = self.contexts.get(call.module, CONTEXT)
        keys = streams
        if call.arguments.get(CONTEXT) is not None and context not in streams:
            if not self.plan.is_cut(context):
                # Whole on every rank, such as text.
                return attention(q, k, v, mask)
            keys = (context,)

        self._check_length(call.module, k.shape[1], keys)
        if mask is not None:
            mask = self._whole_mask(call, mask, keys)
        if k.shape[2] != q.shape[2]:
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        return self._by_heads(attention, q, k, v, mask, streams, keys)

    def _by_heads(
        self,
        attention: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        streams: Streams,
        keys: Streams,
    ) -> Tensor:
        """The attention of a range of the heads of all samples, over the tokens of all ranks."""
        samples, _, heads, _ = q.shape
        widths = [q.shape[-1], k.shape[-1], v.shape[-1]]
        if keys == streams:
            qkv = self._to_heads(torch.cat([q, k, v], dim=-1), streams)
            q, k, v = qkv.split(widths, dim=-1)
        else:
            q = self._to_heads(q, streams)
            k, v = self._to_heads(torch.cat([k, v], dim=-1), keys).split(widths[1:], dim=-1)

        if mask is not None:
            start, stop = balanced_range(samples * heads, self.mesh.sp_size, self.mesh.sp_rank)
            units = torch.arange(start, stop, device=mask.device)
            mask = mask.expand(samples, heads, *mask.shape[2:])[units // heads, units % heads]
            mask = mask.unsqueeze(1)
        # A rank without heads takes part in the exchanges of backward as well.
        out = attention(q, k, v, mask) if len(q) else q[..., :1] + v[:, :0].sum(1, keepdim=True)
        return self._from_heads(out, samples, heads, streams)

    def _to_heads(self, x: Tensor, streams: Streams) -> Tensor:
        """``[B, L, H, C]`` of this rank's tokens -> ``[n, L, 1, C]`` of all ranks' tokens."""
        samples, _, heads, width = x.shape
        x = self._real(x, 1, streams).transpose(1, 2).flatten(0, 2)  # [B * H * L, C]
        x = exchange(x, self._plan(samples * heads, streams, x), self.mesh.sp_group, kind="heads")
        total = sum(self._counts(streams))
        return x.view(balanced_sizes(samples * heads, self.mesh.sp_size)[self.mesh.sp_rank], total, 1, width)

    def _from_heads(self, x: Tensor, samples: int, heads: int, streams: Streams) -> Tensor:
        """The inverse of ``_to_heads``."""
        plan = self._plan(samples * heads, streams, x)
        back = ExchangePlan(plan.place, plan.pack, plan.recv_splits, plan.send_splits)
        x = exchange(x.flatten(0, 2), back, self.mesh.sp_group, kind="heads")
        local = self._counts(streams)[self.mesh.sp_rank]
        x = x.view(samples, heads, local, x.shape[-1]).transpose(1, 2)
        return self._with_made_up(x, 1, streams)

    def _plan(self, num_heads: int, streams: Streams, x: Tensor) -> ExchangePlan:
        counts = tuple(self._counts(streams))
        return plan_heads(num_heads, counts, self.mesh.sp_rank, x.device)

    def _whole_mask(self, call: _Call, mask: Tensor, streams: Streams) -> Tensor:
        """A mask ``[B, H or 1, 1, L]`` over the keys of this rank for those of all ranks.

        It is gathered once for a forward pass and the arguments that it was made of.
        """
        local = self._local_length(streams)
        while mask.ndim < 4:
            mask = mask.unsqueeze(1)
        if mask.shape[-1] != local or mask.shape[-2] != 1:
            raise ValueError(
                f"got a mask of shape {tuple(mask.shape)} in {self.names[call.module]!r}; expected "
                f"[B, H or 1, 1, {local}], over the keys of this rank; cut in the TokenPlan what "
                "it is made of"
            )
        made_of = [x for name, x in call.arguments.items() if "mask" in name and x is not None]
        key = tuple(map(id, made_of))
        now = self._pass
        if key not in now.masks or not made_of:
            flags = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
            whole = self._whole(flags, -1, streams, kind="mask")
            now.masks[key] = made_of, whole.to(mask.dtype)
        return now.masks[key][1]

    # Which tokens a tensor has.

    def _streams_of(self, module: nn.Module, number: Any, local: int) -> Streams:
        """The streams whose tokens a tensor of this module has, by its length on all ranks."""
        lengths = self._pass.lengths
        key = module, number
        if key not in self._streams:
            names = [stream for stream in self.plan.streams if stream in lengths]
            options = [
                streams for size in (1, 2, 3) for streams in combinations(names, size)
            ]
            matches = [self._local_length(streams) == local for streams in options]
            agreed = torch.tensor(matches, dtype=torch.int32)
            dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self.mesh.host_group)
            if not agreed.any():
                raise ValueError(
                    f"got {local} tokens in {self.names[module]!r}; expected those of a range of "
                    f"{lengths}; cut in the TokenPlan all that enters"
                )
            self._streams[key] = options[int(agreed.argmax())]
        self._check_length(module, local, self._streams[key])
        return self._streams[key]

    def _check_length(self, module: nn.Module, local: int, streams: Streams) -> None:
        expected = self._local_length(streams)
        if local != expected:
            raise ValueError(
                f"got {local} tokens in {self.names[module]!r}; expected {expected}, the range of "
                f"{streams} on this rank; cut in the TokenPlan all that enters"
            )

    def _counts(self, streams: Streams) -> list[int]:
        """The tokens of these streams on each rank."""
        sizes = [balanced_sizes(self._pass.lengths[name], self.mesh.sp_size) for name in streams]
        return [sum(of_rank) for of_rank in zip(*sizes, strict=True)]

    def _local_sizes(self, streams: Streams) -> list[tuple[int, int]]:
        """Of each stream on this rank: its tokens, and those that modules see."""
        sizes = [self._counts((stream,))[self.mesh.sp_rank] for stream in streams]
        wholes = [self._pass.lengths[stream] for stream in streams]
        return [(size, size or min(whole, 1)) for size, whole in zip(sizes, wholes, strict=True)]

    def _local_length(self, streams: Streams) -> int:
        return sum(seen for _, seen in self._local_sizes(streams))

    def _real(self, x: Tensor, axis: int, streams: Streams) -> Tensor:
        """Without made-up tokens."""
        sizes = self._local_sizes(streams)
        if all(size == seen for size, seen in sizes):
            return x
        parts = x.split([seen for _, seen in sizes], axis)
        return torch.cat([p.narrow(axis, 0, n) for p, (n, _) in zip(parts, sizes, strict=True)], axis)

    def _with_made_up(self, x: Tensor, axis: int, streams: Streams) -> Tensor:
        """With zeros for made-up tokens."""
        sizes = self._local_sizes(streams)
        if all(size == seen for size, seen in sizes):
            return x
        parts: list[Tensor] = []
        for part, (size, seen) in zip(x.split([n for n, _ in sizes], axis), sizes, strict=True):
            zeros = x.new_zeros([*x.shape[:axis], seen - size, *x.shape[axis + 1 :]])
            parts += [part, zeros]
        return torch.cat(parts, axis)

    def _check_made(self) -> None:
        """Refuse a plan whose cuts did not all happen."""
        expected = [
            (pattern, name)
            for plan in (self.plan.inputs, self.plan.outputs)
            for pattern, cuts in plan.items()
            for name in cuts
        ]
        missing = [cut for cut in expected if cut not in self._pass.made]
        if missing:
            raise ValueError(
                f"got a forward that did not call {missing[0][0]!r}; expected its call, where "
                f"{missing[0][1]!r} is cut; correct the TokenPlan"
            )

    def _refuse_attention(
        self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Tensor:
        """In the first pass, an attention of a module that the plan does not name."""
        if self._pass.is_cut and not _calls:
            raise ValueError(
                f"got an attention over {q.shape[1]} cut tokens outside of the modules "
                f"{self.plan.attention}; expected none; name its module in the TokenPlan"
            )
        return attention(q, k, v, mask)


class _Catch(TorchFunctionMode):
    """Hands calls of ``scaled_dot_product_attention`` to a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _catch(self.function, func, args, kwargs, heads_first=True)


def _catch(
    function: Callable[..., Tensor], original: Any, args: Any, kwargs: Any, *, heads_first: bool
) -> Tensor:
    """Call ``function(attention, q, k, v, mask)`` in place of an attention function."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    q, k, v = (given.pop(name) for name in names[:3])
    mask = given.pop("attn_mask", None)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        with _calling(None):
            if heads_first:
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out: Tensor = original(q, k, v, attn_mask=mask, **given)
            return out.transpose(1, 2) if heads_first else out

    if heads_first:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = function(attention, q, k, v, mask)
    return out.transpose(1, 2) if heads_first else out


def _caught(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Tensor:
    """An attention of the innermost call."""
    call = _calls[-1] if _calls else None
    return attention(q, k, v, mask) if call is None else call.attend(call, attention, q, k, v, mask)


def _catch_dispatch(module: nn.Module) -> None:
    """Let diffusers' dispatch, which each model file imports by name, be caught there.

    Outside of a call of a module that attends it is what it was.
    """
    processor = getattr(module, "processor", None)
    namespace = vars(sys.modules[type(processor).__module__])
    dispatch = namespace.get(DISPATCH)
    if dispatch is None or getattr(dispatch, "is_caught", False):
        return

    def caught(*args: Any, **kwargs: Any) -> Any:
        return _catch(_caught, dispatch, args, kwargs, heads_first=False)

    caught.is_caught = True  # type: ignore[attr-defined]
    namespace[DISPATCH] = caught
