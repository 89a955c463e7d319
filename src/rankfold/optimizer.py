"""RiemannianSGD: options, state, and one loop over stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import checks
from .diagnostics import measure
from .eager import uncompiled, uncompiled_itself
from .factors import Grid, require_disjoint
from .geometries import EVENTS, geometry_for, is_isometry
from .groups import as_grid_list, name_grids, step_options
from .movers import Mover, chunks, movers
from .precision import current_device, exact_arithmetic, working_dtype
from .stacks import Plan, Stack, TensorOf, grad_of, itself, needs_master, plans_for

Group = dict[str, Any]

# What a parameter group holds beside torch's own keys and the options.
_GRID_KEYS = ("grids", "grid_names")
# Plans kept for different sets of grids with gradients; a model has a few of these at most.
_MOST_PLANS = 32


class RiemannianSGD(Optimizer):
    """Riemannian gradient descent on products ``W_ij = A_i B_jᵀ`` of factors.

    Args:
        grids: an iterable of `Grid`, or of dicts ``{"grids": [...], "lr": ..., ...}``, one a
            parameter group with options of its own. Grids that share a parameter share a group.
        lr: learning rate η ≥ 0, a float or a 0-dim tensor. With a normalization it is the length
            of each member's step in that norm.
        geometry: ``"fixed-embedded"``, ``"fixed-quotient"``, ``"isometry-embedded"``,
            ``"isometry-quotient"`` or ``"isometry-canonical"``.
        momentum: ν in [0, 1); the momentum is ν·(transported momentum) + (1 − ν)·gradient.
        nesterov: look ahead, and step along ν·momentum + (1 − ν)·gradient instead of the momentum.
        normalize: ``"metric"`` (the geometry's own norm), ``"spectral"`` (largest singular value
            of the tangent matrix, of the stacked matrix for a grid), None, or ``"schatten-p"``
            with a number p from 1 to ``inf``: not the gradient scaled, but the direction of
            steepest descent when steps are measured by the ℓᵖ norm of singular values, of the
            stacked tangent matrix or, for quotient and canonical geometries, of the factors'
            parts. ``schatten-2`` is ``metric``; ``schatten-inf`` gives every singular value of a
            step about the same size, as Muon does to a matrix that is no product; ``whitened``
            does so to each factor's part alone, which is cheaper, and the same for the quotient
            and canonical geometries.
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
            factors that start rank-deficient, like LoRA's zero B. The one option that gives up
            gauge invariance: it compares a factor's size with a fixed number.
        trust_region: clip each step to this share, in (0, 1], of the largest one for which the
            retraction is certain to be well defined. None leaves steps alone.
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
        nesterov: bool = False,
        normalize: str | None = "metric",
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
            "nesterov": nesterov,
            "normalize": normalize,
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
        items: list[Any] = [grids] if isinstance(grids, Grid) else list(grids)
        if not items:
            raise ValueError("RiemannianSGD got no grids")
        groups = items if isinstance(items[0], dict) else [{"grids": items}]
        self._recording = False
        self._reset_caches()
        super().__init__(groups, defaults)

    def _reset_caches(self) -> None:
        self._plans: dict[tuple[object, ...], list[Plan]] = {}
        self._looked_at: set[str] = set()
        self._counted: dict[str, Counter[str]] = {}
        self._recorded: list[tuple[list[str], dict[str, Tensor]]] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._recording = vars(self).get("_recording", False)  # not there yet in an unpickled one
        self._reset_caches()

    def add_param_group(self, param_group: Group) -> None:
        """Add a group ``{"grids": [...], **options}``; options left out take the defaults."""
        grids = as_grid_list(param_group)
        options = {**self.defaults, **param_group}
        checks.check_options(options)
        names = name_grids(grids, [n for g in self.param_groups for n in g["grid_names"]])
        labelled = list(zip(names, grids, strict=True))
        taken = {id(p) for other in self.param_groups for p in other["params"]}
        for name, grid in labelled:
            checks.check_grid(name, grid, options, taken)
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
            self._require_orthonormal(Plan(present))
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
        ready = [
            (group, plan)
            for index, group in enumerate(self.param_groups)
            for plan in self._plans_of(index, group)
        ]
        if self._recording:
            self._recorded = []
        with exact_arithmetic(kind for _, plan in ready for kind in plan.device_types):
            for group, plan in ready:
                self._look(group, plan)
            for group, plan in ready:
                with current_device(plan.device):
                    self._update(group, plan)

    @uncompiled
    def _plans_of(self, index: int, group: Group) -> list[Plan]:
        """Plans for the grids that have gradients now, kept until these or dtypes change."""
        active = [
            (name, grid)
            for name, grid in zip(group["grid_names"], group["grids"], strict=True)
            if checks.has_gradients(name, grid)
        ]
        if not active:
            return []
        key = (index, *((n, p.dtype, p.device) for n, grid in active for p in grid.params()))
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._counted = self._count_all()
                self._plans.clear()
            self._plans[key] = plans_for(active)
        return self._plans[key]

    @uncompiled
    def _look(self, group: Group, plan: Plan) -> None:
        """All looks at values, before anything is changed: one on the first step of each member."""
        if group["on_nonfinite"] == "raise":
            for mover in movers(plan, {"grad": grad_of}):
                for stack, at in chunks(mover):
                    checks.require_finite(stack.members[at], mover.read("grad", stack, at))
        fresh = [s for s in plan.stacks if not self._looked_at.issuperset(s.members)]
        if not fresh:
            return
        isometry = is_isometry(group["geometry"])
        if isometry:
            self._require_orthonormal(plan)
        for mover in movers(plan, {"weight": itself, "grad": grad_of}, fresh):
            for stack, at in chunks(mover):
                names, point = stack.members[at], mover.read("weight", stack, at)
                if not (isometry or group["damping"]):
                    checks.check_full_rank(names, point)
                grad = mover.read("grad", stack, at)
                checks.warn_if_inconsistent(names, point, grad, isometry)
        for stack in fresh:
            self._looked_at.update(stack.members)

    def _require_orthonormal(self, plan: Plan) -> None:
        with torch.no_grad(), exact_arithmetic(plan.device_types):
            weights = plan.gather(itself)
            for stack in plan.stacks:
                checks.check_orthonormal(stack.members, stack.read(weights), stack.rounded)

    def _update(self, group: Group, plan: Plan) -> None:
        tensors: dict[str, TensorOf] = {"weight": itself, "grad": grad_of}
        tensors["master"] = self._master_of
        if group["momentum"] > 0:
            tensors["momentum"] = self._momentum_of
        else:
            for param in group["params"]:
                self.state.get(param, {}).pop("momentum", None)
        for mover in movers(plan, tensors):
            for stack, members in chunks(mover):
                self._advance(group, mover, stack, members)
            mover.finish()

    def _advance(self, group: Group, mover: Mover, stack: Stack, members: slice) -> None:
        """Move one chunk, and let go of all it took before the next one begins."""
        geometry = geometry_for(group["geometry"], stack.lefts, stack.rights)
        options = step_options(group, geometry, stack.largest)
        point = mover.read("weight", stack, members)
        grad = mover.read("grad", stack, members)
        before = mover.read("momentum", stack, members) if options.momentum > 0 else None
        outcome = geometry.step(point, grad, before, options)
        if self._recorded is not None and self._recording:
            # Before anything is written: these may be views of what is written into.
            numbers = measure(geometry, point, grad, before, outcome, options)
            self._recorded.append((stack.members[members], numbers))
        mover.write(stack, members, outcome.point, outcome.momentum)
        stack.count(outcome.events, members)

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
        counted = self._count_all()
        found: dict[str, dict[str, float]] = {}
        for members, numbers in self._recorded:
            columns = {name: values.tolist() for name, values in numbers.items()}
            for k, member in enumerate(members):
                events = counted.get(member, Counter())
                found[member] = {name: column[k] for name, column in columns.items()}
                found[member].update({event: events[event] for event in EVENTS})
        return found

    def _count_all(self) -> dict[str, Counter[str]]:
        total = {member: Counter(events) for member, events in self._counted.items()}
        for plan in (plan for plans in self._plans.values() for plan in plans):
            for stack in plan.stacks:
                for member, events in stack.counts().items():
                    total.setdefault(member, Counter()).update(events)
        return total

    def reset_momentum(self) -> None:
        """Forget all momentum: the hard reset, for runs whose past has become misleading."""
        for state in self.state.values():
            state.pop("momentum", None)

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        """The parameter's state, with a master on its device if it needs one."""
        state: dict[str, Tensor] = self.state[param]
        if needs_master(param):
            master = state.get("master")
            if master is None:
                state["master"] = param.detach().to(working_dtype(param.dtype))
            elif master.device != param.device:
                state["master"] = master.to(param.device)
        return state

    def _master_of(self, param: Tensor) -> Tensor:
        """The master of a parameter that needs one, in working precision."""
        state, dtype = self._state_of(param), working_dtype(param.dtype)
        if state["master"].dtype != dtype:
            state["master"] = state["master"].to(dtype)
        return state["master"]

    def _momentum_of(self, param: Tensor) -> Tensor:
        """The parameter's momentum, of its shape, in working precision and on its device."""
        state: dict[str, Tensor] = self.state[param]
        momentum = state.get("momentum")
        dtype = working_dtype(param.dtype)
        if momentum is None:
            momentum = torch.zeros_like(param, dtype=dtype)
        elif momentum.device != param.device or momentum.dtype != dtype:
            momentum = momentum.to(param.device, dtype)
        state["momentum"] = momentum
        return momentum

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only; grids are left out, since they are code, not state."""

        def without_grids(_: Optimizer, saved: dict[str, Any]) -> None:
            for group in saved["param_groups"]:
                for key in _GRID_KEYS:
                    del group[key]

        hook = self.register_state_dict_post_hook(without_grids, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options, momenta and masters; grids stay this optimizer's own.

        State goes to the devices of its parameters and keeps its dtype, where torch would cast
        float32 masters and momenta to the dtype of a bfloat16 parameter.
        """
        own_grids = [{key: group[key] for key in _GRID_KEYS} for group in self.param_groups]
        loaded: dict[str, Any] = {}

        def remember(_: Optimizer, saved: dict[str, Any]) -> None:
            loaded.update(saved)

        def restore(_: Optimizer) -> None:
            for group, grids in zip(self.param_groups, own_grids, strict=True):
                group.update(grids)
            ids = [i for group in loaded["param_groups"] for i in group["params"]]
            params = [p for group in self.param_groups for p in group["params"]]
            for index, param in zip(ids, params, strict=True):
                for key, value in loaded["state"].get(index, {}).items():
                    self.state[param][key] = value.detach().to(param.device, copy=True)

        before = self.register_load_state_dict_pre_hook(remember)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()
