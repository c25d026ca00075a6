"""Full attention over cut tokens: a ``TokenPlan`` carried out in a model that is not edited.

Each rank holds a range of the tokens of every sample, of any length. Queries, keys and values
change from ranges of tokens to ranges of the heads of all samples in one exchange, and the output
comes back, as in DeepSpeed-Ulysses (Jacobs et al., 2023), for any numbers of tokens, heads and
ranks. After the exchange tokens are in the order of the ranks, which attention does not depend on.

Which streams a tensor has the tokens of (video, text, or both) follows from its length on all
ranks, which they compare once for each call.

Legend: B samples, L tokens, H heads, D channels of a head, n heads of all samples held.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_sp.common.graphs import (
    Context,
    after_backward,
    between_graphs,
    is_backward_running,
    uncompiled,
)

from .attention_calls import Attention, catch_dispatch, catching
from .collectives import Received, exchange, gather_rows
from .engine import Attachment, ForwardPoint, SequenceParallel
from .layout import ExchangePlan, balanced_range, plan_heads
from .rank_groups import RankGroup
from .shard_plan import find_modules
from .token_plan import CONTEXT, Cut, TokenPlan
from .token_ranges import Streams, TokenRanges


@dataclass
class _Pass:
    """One forward pass.

    ``cut`` are the streams that are cut, and not yet gathered; ``made`` the cuts so far;
    ``attended`` the modules that attended to cut tokens. ``pieces`` and ``masks`` are kept by the
    identity of the tensors that they were made of, which are kept with them. ``kept`` has the
    contexts in which modules are recomputed, with what they received from other ranks.
    """

    ranges: TokenRanges
    output: str = "full"
    cut: set[str] = field(default_factory=set)
    made: set[tuple[str, str | int]] = field(default_factory=set)
    attended: set[nn.Module] = field(default_factory=set)
    pieces: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)
    masks: dict[Any, tuple[list[Any], Tensor]] = field(default_factory=dict)
    kept: dict[nn.Module, Context] = field(default_factory=dict)


class TokenPoints:
    """The points of a model with a ``TokenPlan``, and the functions to attach there."""

    def __init__(self, engine: SequenceParallel) -> None:
        self.engine, self.model, self.mesh = engine, engine.model, engine.mesh
        assert isinstance(engine.plan, TokenPlan)
        self.plan = engine.plan
        self.contexts: dict[nn.Module, str] = {}
        for pattern, stream in self.plan.contexts.items():
            self.contexts |= dict.fromkeys(find_modules(self.model, pattern), stream)

        self._pass = self._new_pass("full")
        # Without processes tensors have no values to compare.
        self._is_checked = self.mesh.is_imagined
        # What was learned in a first pass, by group, whose ranks have learned the same: the streams
        # of each tensor of a module, and the modules under gradient checkpointing.
        self._streams: dict[tuple[RankGroup, nn.Module, Any], Streams] = {}
        self._recomputed: set[tuple[RankGroup, nn.Module]] = set()

    def attachments(self) -> list[Attachment]:
        """Each point with the function to attach, the innermost function of a module first."""
        plan = self.plan
        functions: list[tuple[str, Callable[..., Any]]] = [
            *((pattern, self._attend) for pattern in plan.attention),
            *((pattern, partial(self._cut_outputs, pattern)) for pattern in plan.outputs),
            # The last attached is the first to run: cuts are made in the order of the plan.
            *(
                (pattern, partial(self._cut_inputs, pattern))
                for pattern in reversed([*plan.inputs])
            ),
            *((pattern, partial(self._gather, pattern)) for pattern in plan.gather),
            ("", self._forward),
        ]
        points: list[Attachment] = []
        for pattern, function in functions:
            for module in find_modules(self.model, pattern):
                signature = inspect.signature(module.forward)
                self._check_names(pattern, signature)
                call = partial(self._call, function, module, signature)
                points.append((ForwardPoint(module), call))
                catch_dispatch(module)
        return points

    @between_graphs
    def _call(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        signature: inspect.Signature,
        forward: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call the function, or the bare module in a group of one rank."""
        output = kwargs.pop("output", "full") if function == self._forward else "full"
        if self.mesh.sp_size == 1:
            return forward(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        if function == self._forward:
            self._pass = self._new_pass(output)
        return function(module, lambda: forward(*bound.args, **bound.kwargs), bound.arguments)

    def _new_pass(self, output: str) -> _Pass:
        return _Pass(TokenRanges(self.mesh.sp_size, self.mesh.sp_rank), output)

    @between_graphs
    def _forward(self, model: nn.Module, run: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """Run the model. In the first pass all that the plan names has to happen."""
        if self._is_checked:
            return run()
        with catching(self._refuse_attention):
            output = run()
        self._check_cuts()
        self._is_checked = True
        return output

    # Cuts and gathers.

    @between_graphs
    def _cut_inputs(
        self, pattern: str, module: nn.Module, run: Callable[[], Any], arguments: dict[str, Any]
    ) -> Any:
        self._cut_arguments(pattern, arguments)
        return run()

    # State of a pass belongs to no graph; the module that runs next may be one.
    @uncompiled
    def _cut_arguments(self, pattern: str, arguments: dict[str, Any]) -> None:
        for name, cut in self.plan.inputs[pattern].items():
            self._pass.made.add((pattern, name))
            if arguments.get(name) is not None:
                arguments[name] = self._cut(arguments[name], cut, name)

    @between_graphs
    def _cut_outputs(
        self, pattern: str, module: nn.Module, run: Callable[[], Any], arguments: dict[str, Any]
    ) -> Any:
        return self._map_outputs(run(), self.plan.outputs[pattern], partial(self._cut_one, pattern))

    def _cut_one(self, pattern: str, index: int, output: Tensor, cut: Cut) -> Any:
        self._pass.made.add((pattern, index))
        return self._cut(output, cut, f"output {index} of {pattern}")

    @between_graphs
    def _gather(
        self, pattern: str, module: nn.Module, run: Callable[[], Any], arguments: dict[str, Any]
    ) -> Any:
        axes = {i: axis for i, axis in enumerate(self.plan.gather[pattern]) if axis is not None}
        return self._map_outputs(run(), axes, partial(self._gather_one, module))

    def _gather_one(self, module: nn.Module, index: int, output: Tensor, axis: int) -> Tensor:
        now = self._pass
        now.cut.clear()
        if now.output == "shards":
            return output
        streams = self._streams_of(module, ("output", index), output.shape[axis])
        # Each stream in its own order.
        sizes = [now.ranges.num_seen((stream,)) for stream in streams]
        parts = zip(output.split(sizes, axis), streams, strict=True)
        wholes = [self._whole(part, axis, (stream,), kind="gather") for part, stream in parts]
        whole = wholes[0] if len(wholes) == 1 else torch.cat(wholes, axis)
        if whole.requires_grad:
            whole.register_hook(partial(self._resume, now))
        return whole

    @uncompiled
    def _map_outputs(self, outputs: Any, arguments: Any, function: Callable[..., Any]) -> Any:
        """The outputs of a module, some of them by ``function(index, output, argument)``."""
        parts = [*outputs] if isinstance(outputs, tuple | list) else [outputs]
        for index, argument in arguments.items():
            parts[index] = function(index, parts[index], argument)
        return type(outputs)(parts) if isinstance(outputs, tuple | list) else parts[0]

    def _cut(self, whole: Any, cut: Cut, name: str) -> Any:
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

        now, length = self._pass, whole.shape[cut.axis]
        if name in self.plan.streams:
            if name in now.cut and not is_backward_running():
                raise ValueError(
                    f"got {name!r} to cut a second time; expected it whole; cut it where it enters "
                    "the first block alone"
                )
            now.ranges.lengths[name] = length
            now.cut.add(name)
        elif length == 1:
            # The same for all tokens.
            return whole
        if whole.requires_grad or name in self.plan.streams:
            return self._piece(whole, cut, name)
        # Blocks that get the same tensor get the same piece.
        key = id(whole), cut
        if key not in now.pieces:
            now.pieces[key] = whole, self._piece(whole, cut, name)
        return now.pieces[key][1]

    def _piece(self, whole: Tensor, cut: Cut, name: str) -> Tensor:
        ranges, length = self._pass.ranges, whole.shape[cut.axis]
        lengths = [ranges.lengths.get(stream, 0) for stream in cut.streams] or [length]
        if sum(lengths) != length:
            raise ValueError(
                f"got {name!r} with {length} tokens; expected the tokens of {cut.streams}, "
                f"{lengths}; correct the TokenPlan"
            )
        parts = [ranges.cut(part, cut.axis) for part in whole.split(lengths, cut.axis)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, cut.axis)

    def _whole(self, piece: Tensor, axis: int, streams: Streams, *, kind: str) -> Tensor:
        """All ranks' tokens, in the order of the ranks."""
        ranges = self._pass.ranges
        rows = ranges.without_made_up(piece, axis, streams).movedim(axis, 0).contiguous()
        counts = [*ranges.counts(streams)]
        return gather_rows(rows, counts, self.mesh.sp_group, kind=kind).movedim(0, axis)

    def _resume(self, earlier: _Pass, grad: Tensor) -> None:
        """Blocks may be recomputed now, of the pass whose output has its gradient."""
        self._pass = earlier
        after_backward(partial(self._drop_kept, earlier))

    def _drop_kept(self, ended: _Pass) -> None:
        """Drop what modules received that this backward pass has not recomputed."""
        self._recomputed -= {(self._group, module) for module in ended.kept}
        ended.kept.clear()

    # Attention.

    @uncompiled
    def _attend(self, module: nn.Module, run: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """Run a module that attends, its attentions distributed by heads."""
        now = self._pass
        kept: Context | None = None
        if is_backward_running():
            self._recomputed.add((self._group, module))
            kept = now.kept.pop(module, None)
        elif now.cut:
            kept = self._keep(module)
            now.attended.add(module)
        if module not in now.attended:
            # Before the cut, such as of a text refiner.
            return run()

        caught: list[Attention] = []

        def distribute(attention: Attention, *tensors: Any) -> Tensor:
            caught.append(attention)
            return self._distribute(module, arguments, len(caught), attention, *tensors)

        with kept or nullcontext(), catching(distribute):
            output = run()
        if not caught:
            raise ValueError(
                f"got {self._name(module)!r}, which computes no attention that can be caught; "
                "expected scaled_dot_product_attention, or diffusers' dispatch; set such a "
                "processor, or leave the module out of the TokenPlan"
            )
        return output

    def _keep(self, module: nn.Module) -> Context | None:
        """A context that keeps what the module receives from other ranks, if it is recomputed."""
        now = self._pass
        if module in now.attended:
            # Which of its calls is recomputed is not known.
            now.kept.pop(module, None)
            return None
        resends = self.engine.options.recompute_communication
        is_recomputed = (self._group, module) in self._recomputed
        if resends or not is_recomputed or not torch.is_grad_enabled():
            return None
        received = Received()
        now.kept[module] = received.reusing()
        return received.keeping()

    def _distribute(
        self, module: nn.Module, arguments: Any, number: int, attention: Attention, *tensors: Any
    ) -> Tensor:
        """One attention of the tokens of this rank: q, k, v ``[B, L, H, D]``, and a mask."""
        q, k, v, mask = tensors
        if attention.settings.get("is_causal"):
            raise ValueError(
                f"got a causal attention in {self._name(module)!r}; expected one in both "
                "directions: tokens are in the order of the ranks; leave the module out of the "
                "TokenPlan"
            )
        streams = self._streams_of(module, number, q.shape[1])
        keys, context = streams, self.contexts.get(module, CONTEXT)
        if arguments.get(CONTEXT) is not None and context not in streams:
            if not self.plan.is_cut(context):
                # Whole on every rank, such as text.
                return attention(q, k, v, mask)
            keys = (context,)

        self._check_length(module, k.shape[1], keys)
        if mask is not None:
            mask = self._whole_mask(module, arguments, mask, keys)
        if k.shape[2] != q.shape[2]:
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        return self._by_heads(attention, [q, k, v], mask, streams, keys)

    def _by_heads(
        self, attention: Attention, qkv: list[Tensor], mask: Any, streams: Streams, keys: Streams
    ) -> Tensor:
        """The attention of a range of the heads of all samples, over the tokens of all ranks."""
        q, k, v = qkv
        samples, _, heads, _ = q.shape
        widths = [x.shape[-1] for x in qkv]
        if keys == streams:
            q, k, v = self._to_heads(torch.cat(qkv, dim=-1), streams).split(widths, dim=-1)
        else:
            q = self._to_heads(q, streams)
            k, v = self._to_heads(torch.cat([k, v], dim=-1), keys).split(widths[1:], dim=-1)

        if mask is not None:
            start, stop = balanced_range(samples * heads, self.mesh.sp_size, self.mesh.sp_rank)
            unit = torch.arange(start, stop, device=mask.device)
            mask = mask.expand(samples, heads, *mask.shape[2:])[unit // heads, unit % heads, None]
        if len(q):
            out = attention(q, k, v, mask)
        else:
            # A rank without heads takes part in the exchanges of backward as well.
            out = q.new_empty(*q.shape[:3], widths[2]) + 0 * (q.sum() + k.sum() + v.sum())
        return self._from_heads(out, samples, heads, streams)

    def _to_heads(self, x: Tensor, streams: Streams) -> Tensor:
        """``[B, L, H, C]`` of this rank's tokens -> ``[n, L, 1, C]`` of all ranks' tokens."""
        samples, _, heads, width = x.shape
        ranges = self._pass.ranges
        x = ranges.without_made_up(x, 1, streams).transpose(1, 2).flatten(0, 2)
        plan = self._plan(samples * heads, streams, x.device)
        x = exchange(x, plan, self.mesh.sp_group, kind="heads")
        length = sum(ranges.counts(streams))
        return x.view(len(x) // max(length, 1), length, 1, width)

    def _from_heads(self, x: Tensor, samples: int, heads: int, streams: Streams) -> Tensor:
        """The inverse of ``_to_heads``."""
        ranges = self._pass.ranges
        plan = self._plan(samples * heads, streams, x.device)
        back = ExchangePlan(plan.unpack, plan.pack, plan.recv_splits, plan.send_splits)
        x = exchange(x.flatten(0, 2), back, self.mesh.sp_group, kind="heads")
        local = ranges.counts(streams)[self.mesh.sp_rank]
        x = x.view(samples, heads, local, x.shape[-1]).transpose(1, 2)
        return ranges.with_made_up(x, 1, streams)

    def _plan(self, num_heads: int, streams: Streams, device: torch.device) -> ExchangePlan:
        counts = self._pass.ranges.counts(streams)
        return plan_heads(num_heads, counts, self.mesh.sp_rank, device)

    def _whole_mask(
        self, module: nn.Module, arguments: dict[str, Any], mask: Tensor, keys: Streams
    ) -> Tensor:
        """A mask ``[B, H or 1, 1, L]`` over the keys of this rank -> over the keys of all ranks.

        It is gathered once in a forward pass for the arguments that it was made of.
        """
        while mask.ndim < 4:
            mask = mask.unsqueeze(1)
        local = self._pass.ranges.num_seen(keys)
        if mask.shape[2:] != (1, local):
            raise ValueError(
                f"got a mask of shape {tuple(mask.shape)} in {self._name(module)!r}; expected "
                f"[B, H or 1, 1, {local}], over the keys of this rank: no mask of L x L is held; "
                "cut in the TokenPlan what it is made of"
            )
        made_of = [x for name, x in arguments.items() if "mask" in name and x is not None]
        key = keys, *map(id, made_of)
        masks = self._pass.masks
        if key not in masks or not made_of or mask.requires_grad:
            flags = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
            whole = self._whole(flags, 3, keys, kind="mask").to(mask.dtype)
            masks[key] = [*made_of, mask], whole
        elif not (self._is_checked or torch.equal(mask, masks[key][0][-1])):
            raise ValueError(
                f"got another mask in {self._name(module)!r}, made of the same argument; expected "
                "one for all modules, which is gathered once; give each mask its own argument"
            )
        return masks[key][1]

    # Which tokens a tensor has, and what a plan leaves out.

    def _streams_of(self, module: nn.Module, number: Any, length: int) -> Streams:
        """The streams that a tensor of a module has, by its length on all ranks."""
        ranges, key = self._pass.ranges, (self._group, module, number)
        if key not in self._streams:
            candidates = ranges.combinations(self.plan.streams)
            matches = torch.tensor([ranges.num_seen(c) == length for c in candidates]).int()
            if not self.mesh.is_imagined:
                dist.all_reduce(matches, dist.ReduceOp.MIN, group=self.mesh.host_group)
            if not matches.any():
                self._refuse_length(module, length, f"range of one or more of {ranges.lengths}")
            self._streams[key] = candidates[int(matches.argmax())]
        self._check_length(module, length, self._streams[key])
        return self._streams[key]

    def _check_length(self, module: nn.Module, length: int, streams: Streams) -> None:
        expected = self._pass.ranges.num_seen(streams)
        if length != expected:
            self._refuse_length(module, length, f"{expected}, the range of {streams}")

    def _refuse_length(self, module: nn.Module, length: int, expected: str) -> None:
        raise ValueError(
            f"got {length} tokens in {self._name(module)!r}; expected this rank's {expected}; cut "
            "in the TokenPlan all that enters"
        )

    def _check_names(self, pattern: str, signature: inspect.Signature) -> None:
        missing = [n for n in self.plan.inputs.get(pattern, {}) if n not in signature.parameters]
        if missing:
            raise ValueError(
                f"got {missing[0]!r} to cut where {pattern!r} is called; expected one of its "
                f"arguments {[*signature.parameters]}; correct the TokenPlan"
            )

    def _check_cuts(self) -> None:
        """Refuse a plan with a cut that did not happen, or whose tokens were not gathered."""
        if self._pass.cut:
            raise ValueError(
                f"got a forward that called none of {[*self.plan.gather]}; expected a call, where "
                "the tokens of all ranks are gathered; correct the TokenPlan"
            )
        for cuts in (self.plan.inputs, self.plan.outputs):
            for pattern, names in cuts.items():
                missing = [name for name in names if (pattern, name) not in self._pass.made]
                if missing:
                    raise ValueError(
                        f"got a forward that did not call {pattern!r}; expected its call, where "
                        f"{missing[0]!r} is cut; correct the TokenPlan"
                    )

    def _refuse_attention(self, attention: Attention, *tensors: Any) -> Tensor:
        """In the first pass: an attention of a module that the plan does not name."""
        if self._pass.cut:
            raise ValueError(
                f"got an attention over {tensors[0].shape[1]} tokens in a module that is none of "
                f"{len(self.plan.attention)} that attend; expected its name; add it to attention "
                "in the TokenPlan"
            )
        return attention(*tensors)

    @property
    def _group(self) -> RankGroup:
        return self.mesh.current.ranks

    def _name(self, module: nn.Module) -> str:
        names: dict[nn.Module, str] = {m: name for name, m in self.model.named_modules()}
        return names[module]
