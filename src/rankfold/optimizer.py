"""RiemannianSGD: options, and one loop over stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from . import checks, option_checks
from .checking import Checking
from .diagnostics import Measured, by_member, measure
from .eager import uncompiled, uncompiled_itself
from .factors import Grid, require_disjoint
from .geometries import geometry_for, is_isometry, scale
from .geometries.endings import formed
from .groups import (
    Group,
    JointPlan,
    Owner,
    Rate,
    alike,
    as_grid_list,
    as_groups,
    name_grids,
    step_options,
)
from .movers import Mover, chunks, movers
from .precision import current_device, exact_arithmetic
from .stacks import Plan, Stack, TensorOf, grad_of, itself, plans_for
from .state import RunningNumbers, StatefulOptimizer

# Plans kept for different sets of grids with gradients; a model has a few of these at most.
_MOST_PLANS = 32


class RiemannianSGD(StatefulOptimizer):
    """Riemannian gradient descent on products ``W_ij = A_i B_jᵀ`` of factors.

    Args:
        grids: an iterable of `Grid`, or of dicts ``{"grids": [...], "lr": ..., ...}``, one a
            parameter group with options of its own. Grids that share a parameter share a group.
            Groups that differ in their learning rates alone step together, as one batch.
        lr: learning rate η ≥ 0, a float or a 0-dim tensor. With a normalization it is the length
            of each member's step in that norm.
        geometry: ``"fixed-embedded"``, ``"fixed-quotient"``, ``"isometry-embedded"``,
            ``"isometry-quotient"`` or ``"isometry-canonical"``.
        momentum: ν in [0, 1); the momentum is ν·(transported momentum) + (1 − ν)·gradient.
        momentum_form: ``"smoothing"`` is that. ``"unit-smoothing"`` takes in gradients over their
            metric norms: all count alike. ``"heavy-ball"`` keeps the last step itself, and a step
            is ν·(transported last step) − η·gradient; ``normalize`` is then of the gradient.
        nesterov: look ahead, and step along ν·momentum + (1 − ν)·gradient instead of the momentum;
            with a heavy ball along ν·(step) − η·gradient, while the step is kept.
        bias_correction: divide the momentum by the sum 1 − ν^t of the weights in it. Steps that are
            normalized by their own length do not notice.
        second_moment: β in [0, 1); above 0 a step is divided not by its own norm but by the root of
            the running mean (with the weight 1 − β for the newest, bias-corrected) of the squared
            norms of gradients: Adam with one number a member. Needs a ``normalize`` that is a norm.
        growth: γ ≥ 0, for fixed-rank geometries: a member's learning rate is multiplied by s^γ,
            with s the root mean square of the singular values of its products. At ½ steps grow
            with products as those of optimizers do that see factors alone, at 1 they are relative.
        tilt: 0, ⅛, ¼, ½ or 1, for whitened steps of fixed-rank geometries: past singular values of
            one size by so much of the way to those of a natural gradient, the smallest the longest.
        row_balance: in [0, 1], for the same steps: how far rows of factors are brought to one size,
            before and after.
        normalize: ``"metric"`` (the geometry's own norm), ``"spectral"`` (largest singular value
            of the tangent matrix, of the stacked matrix for a grid), None, or ``"schatten-p"``
            with a number p from 1 to ``inf``: not the gradient scaled, but the direction of
            steepest descent when steps are measured by the ℓᵖ norm of singular values, of the
            stacked tangent matrix or, for quotient and canonical geometries, of the factors'
            parts. ``schatten-2`` is ``metric``; ``schatten-inf`` gives every singular value of a
            step about the same size, as Muon does to a matrix that is no product; ``whitened``
            does so to each factor's part alone, which is cheaper, with that size as the root mean
            square over the products that a factor is in.
        weight_decay: λ ≥ 0, for fixed-rank geometries. Before each step the product is scaled by
            1 − ηλ, and the step goes from there, as AdamW's does; the momentum stays the matrix
            it is.
        decay_to: σ ≥ 0: with a weight decay singular values are drawn to this number instead of 0,
            W + ηλ (σ polar(W) − W).
        scale_lr: for isometries: learn one scale s for the products of a member, W_ij = s U_i V_jᵀ.
            It is kept in the factors, √s in each. log s moves by this rate, a float or a 0-dim
            tensor, times the cosine between factors and their gradients, whatever `Grid.rate` is.
            0 keeps scales as they are, None is for factors without one.
        norm_floor: c > 0; steps are divided by max(norm, c).
        retraction: by name, or None for the geometry's default. ``fixed-embedded``: svd,
            orthographic. ``fixed-quotient``: additive. ``isometry-embedded``: svd for single
            pairs, polar or qr for larger grids. The other isometries: polar, qr.
        maximize: climb instead of descending.
        gradient_repair: what to do about factor gradients that no function of the product has
            (rotary embeddings, rounding): ``"none"``; ``"average"``, the cheap repair; or
            ``"exact"``, the nearest gradient in least squares. Isometry geometries always make
            the exact one, which costs them nothing.
        damping: an absolute ridge δ ≥ 0 in the r×r solves of the fixed-rank geometries, for
            factors that start rank-deficient, like LoRA's zero B. It gives up gauge invariance,
            since it compares a factor's size with a fixed number.
        trust_region: clip each step to this share, in (0, 1], of the largest one for which the
            retraction is certain to be well defined. None leaves steps alone. In
            ``fixed-quotient`` it bounds the change of factors, and so looks at the gauge.
        rank_floor: ``fixed-embedded`` only: keep the singular values of each product above this
            share, in [0, 1), of their root mean square. 0 lets them vanish.
        capturable: make steps that a CUDA graph can record and ``torch.compile`` need not compile
            again: ``lr`` must then be a 0-dim tensor on the parameters' device, and is read there.
            Normalized steps of isometries are no longer than 0.5 in this mode.
        on_nonfinite: ``"skip"`` leaves members with a NaN or infinite step as they are and counts
            them; ``"raise"`` looks at the gradients first, which stops the device, and names them.

    Parameters stay plain parameters and ``.grad`` is never changed. bfloat16 and float16
    parameters keep a float32 master in the state. Parts of a parameter that no grid covers are
    left as they are.
    """

    def __init__(
        self,
        grids: Grid | Iterable[Grid] | Iterable[Group],
        lr: float | Tensor,
        *,
        geometry: str,
        momentum: float = 0.0,
        momentum_form: str = "smoothing",
        nesterov: bool = False,
        bias_correction: bool = False,
        second_moment: float = 0.0,
        growth: float = 0.0,
        tilt: float = 0.0,
        row_balance: float = 0.0,
        normalize: str | None = "metric",
        weight_decay: float = 0.0,
        decay_to: float = 0.0,
        scale_lr: float | Tensor | None = None,
        norm_floor: float = 2**-23,
        retraction: str | None = None,
        maximize: bool = False,
        gradient_repair: str = "average",
        damping: float = 0.0,
        trust_region: float | None = None,
        rank_floor: float = 0.0,
        capturable: bool = False,
        on_nonfinite: str = "skip",
    ) -> None:
        defaults: Group = {
            "lr": lr,
            "geometry": geometry,
            "momentum": momentum,
            "momentum_form": momentum_form,
            "nesterov": nesterov,
            "bias_correction": bias_correction,
            "second_moment": second_moment,
            "growth": growth,
            "tilt": tilt,
            "row_balance": row_balance,
            "normalize": normalize,
            "weight_decay": weight_decay,
            "decay_to": decay_to,
            "scale_lr": scale_lr,
            "norm_floor": norm_floor,
            "retraction": retraction,
            "maximize": maximize,
            "gradient_repair": gradient_repair,
            "damping": damping,
            "trust_region": trust_region,
            "rank_floor": rank_floor,
            "capturable": capturable,
            "on_nonfinite": on_nonfinite,
        }
        groups = as_groups(grids)
        self._recording = False
        self._reset_caches()
        super().__init__(groups, defaults)

    def _reset_caches(self) -> None:
        self._plans: dict[tuple[object, ...], list[JointPlan]] = {}
        self._counted: dict[str, Counter[str]] = {}
        self._recorded: list[Measured] | None = None
        self._checking = Checking(_SHARED)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._recording = vars(self).get("_recording", False)  # not there yet in an unpickled one
        self._reset_caches()
        self._checking.loaded(self.param_groups)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group ``{"grids": [...], **options}``; options left out take the defaults."""
        grids = as_grid_list(param_group)
        options = {**self.defaults, **param_group}
        option_checks.check_names(param_group, ["lr", *_SHARED])
        option_checks.check_options(options)
        names = name_grids(grids, [n for g in self.param_groups for n in g["grid_names"]])
        labelled = list(zip(names, grids, strict=True))
        taken = {id(p) for other in self.param_groups for p in other["params"]}
        for name, grid in labelled:
            option_checks.check_rate(options, Owner.of(0, grid))
            option_checks.check_retraction(name, grid, options)
            checks.check_grid(name, grid, taken)
        require_disjoint(
            (f"grid {name!r}: {side}[{k}]", factor)
            for name, grid in labelled
            for side, k, factor in grid.factors()
        )
        params = {id(p): p for grid in grids for p in grid.params()}
        group = {**param_group, "grids": grids, "grid_names": names}
        group["params"] = list(params.values())
        present = [(n, g) for n, g in labelled if g.params()[0].device.type != "meta"]
        if is_isometry(options["geometry"]):
            checks.require_orthonormal(Plan(present), options["scale_lr"] is not None)
        super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on every grid that has gradients.

        A grid none of whose parameters has a gradient is left alone; one with only some of its
        gradients is an error, raised before anything is changed. Returns the closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss

    # Kept out of compiled code, which cannot follow global settings, and must run within them.
    @uncompiled_itself
    def _step_all(self) -> None:
        for group in self._checking.changed_momenta(self.param_groups):
            self._forget(group)
        ready = [
            (self.param_groups[together[0]], joint)
            for together in alike(self.param_groups, _SHARED)
            for joint in self._plans_of(together)
        ]
        if self._recording:
            self._recorded = []
        with exact_arithmetic(kind for _, joint in ready for kind in joint.plan.device_types):
            for group, joint in ready:
                self._checking.look(self.param_groups, group, joint)
            for group in self.param_groups:
                self._forget_unused(group)
            for group, joint in ready:
                with current_device(joint.plan.device):
                    rates = joint.rates(self.param_groups)
                    running = self._running_of(group, joint.plan)
                    self._update(group, joint.plan, rates, running)
                    for numbers in running.values():
                        numbers.finish()

    @uncompiled
    def _plans_of(self, together: list[int]) -> list[JointPlan]:
        """Plans for those of their grids with gradients now, kept until these or dtypes change."""
        groups = [(index, self.param_groups[index]) for index in together]
        held = {id(param) for _, group in groups for param in group["params"]}
        active = [
            (Owner.of(index, grid), name, grid)
            for index, group in groups
            for name, grid in zip(group["grid_names"], group["grids"], strict=True)
            if checks.has_gradients(name, grid, held)
        ]
        if not active:
            return []
        key = tuple((k, n, p.dtype, p.device) for k, n, grid in active for p in grid.params())
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._counted = self._count_all()
                self._plans.clear()
            owner_of = {name: owner for owner, name, _ in active}
            plans = plans_for([(name, grid) for _, name, grid in active])
            self._plans[key] = [JointPlan(plan, owner_of) for plan in plans]
        return self._plans[key]

    def _update(
        self,
        group: Group,
        plan: Plan,
        rates: dict[int, Rate],
        running: dict[int, RunningNumbers],
    ) -> None:
        tensors: dict[str, TensorOf] = {"weight": itself, "grad": grad_of}
        tensors["master"] = self._master_of
        if group["momentum"] > 0:
            tensors["momentum"] = self._momentum_of
        for mover in movers(plan, tensors):
            for stack, members in chunks(mover):
                rate = rates[id(stack)].of(members)
                self._advance(group, rate, mover, stack, members, running.get(id(stack)))
            mover.finish()

    def _advance(
        self,
        group: Group,
        rate: Rate,
        mover: Mover,
        stack: Stack,
        members: slice,
        numbers: RunningNumbers | None,
    ) -> None:
        """Move one chunk, and let go of all it took before the next one begins."""
        geometry = geometry_for(group["geometry"], stack.lefts, stack.rights)
        options = step_options(group, rate, geometry, stack.largest)
        point = mover.read("weight", stack, members)
        grad = mover.read("grad", stack, members)
        before = mover.read("momentum", stack, members) if options.momentum > 0 else None
        running = None if numbers is None else numbers.read(members)
        divided = None
        if group["scale_lr"] is not None:
            divided = scale.divide(point, grad)
            point, grad = divided.point, divided.grad
        recording = self._recorded is not None and self._recording
        begun = geometry.begin(point, grad, before, options, running)
        # Copies of gradients make room for the new point, unless they are to be measured.
        seen = grad if recording else None
        del grad
        outcome = geometry.finish(begun, before, options, running)
        if recording:
            outcome = replace(outcome, ending=outcome.point)
        new = outcome.ending
        if divided is not None:
            new = scale.multiply(divided, outcome, group["scale_lr"], options)
        if self._recorded is not None and seen is not None:
            # Before anything is written: these may be views of what is written into.
            measured = measure(geometry, point, seen, before, outcome, options, running)
            if divided is not None:
                measured["scale"] = torch.stack(scale.sizes(formed(new))).prod(0)
            self._recorded.append((stack.members[members], measured))
        mover.write(stack, members, new, outcome.momentum)
        if numbers is not None and outcome.running is not None:
            numbers.write(members, outcome.running)
        stack.count(outcome.alive, outcome.marks, members)

    def counts(self) -> dict[str, dict[str, int]]:
        """What happened to each member, by name, since the optimizer was built or loaded.

        ``skipped``: the step was not finite, and the member was left as it was. ``unconverged``:
        a truncated-SVD retraction stopped short of convergence and kept its last iterate, a valid
        retraction all the same; many of these mean steps that are long beside the smallest
        singular value. ``lifted``: a Gram matrix was singular to working precision and its
        diagonal lifted. ``clipped``: the step was cut to the trust region, or to what a
        ``capturable`` step may be. Members to whom nothing happened are left out. Synchronises
        with the device.
        """
        return {member: dict(events) for member, events in self._count_all().items()}

    @property
    def recording_diagnostics(self) -> bool:
        """Whether steps are being measured for `diagnostics`."""
        return self._recording

    def record_diagnostics(self, enabled: bool = True) -> None:
        """Measure each step from here on, or stop doing so.

        While this is off a step does nothing for diagnostics. While it is on a step costs about
        twice as much, takes eigenvalues of Gram matrices, and ends the same to the last bit. The
        last step measured stays readable until recording is switched on anew.
        """
        if enabled and not self._recording:
            self._recorded = None
        self._recording = enabled

    def diagnostics(self) -> dict[str, dict[str, float]]:
        """The numbers of the last recorded step, by member and name; synchronises.

        Only members that took part in that step are there. The counts of `counts` are among
        their numbers, as integers, zeros included. `rankfold.diagnostics.explain` says what they
        mean.
        """
        if self._recorded is None:
            missing = (
                "no step has been taken since recording was switched on"
                if self._recording
                else "recording is off; call optimizer.record_diagnostics() before the steps it "
                "should cover"
            )
            raise RuntimeError(f"there are no diagnostics: {missing}")
        return by_member(self._recorded, self._count_all())

    def _count_all(self) -> dict[str, Counter[str]]:
        total = {member: Counter(events) for member, events in self._counted.items()}
        for joint in (joint for plans in self._plans.values() for joint in plans):
            for stack in joint.plan.stacks:
                for member, events in stack.counts().items():
                    total.setdefault(member, Counter()).update(events)
        return total


# What groups have in common that step together. `defaults` will not do: torch adds to them.
_SHARED = [
    name
    for name, parameter in signature(RiemannianSGD).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY  # all but the learning rate
]
