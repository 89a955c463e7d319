"""When an optimizer checks what: options whenever they change, values on a member's first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import checks, option_checks
from .eager import uncompiled
from .geometries import is_isometry
from .groups import Group, JointPlan
from .movers import chunks, movers
from .stacks import grad_of, itself


class _Kind(NamedTuple):
    """What of a group's options says what its state means.

    ``momentum`` is its geometry, and whether it is of steps rather than of gradients; ``scaled``
    whether factors have a scale of their own.
    """

    momentum: tuple[str, bool]
    scaled: bool

    @classmethod
    def of(cls, group: Group) -> _Kind:
        """Groups that were saved by an earlier version may lack options."""
        of_steps = group.get("momentum_form") == "heavy-ball"
        return cls((group["geometry"], of_steps), group.get("scale_lr") is not None)


class Checking:
    """What has been checked so far.

    ``options`` are the names of those that groups have, but for the learning rate, which changes
    at every step.
    """

    def __init__(self, options: Sequence[str]) -> None:
        self._options = options
        self._seen: dict[int, Group] = {}
        self._kinds: dict[int, _Kind] = {}
        self._looked_at: set[str] = set()

    def loaded(self, groups: Sequence[Group]) -> None:
        """Momenta of these groups are of the options that they have now."""
        known = (k for k, group in enumerate(groups) if "geometry" in group)
        self._kinds = {k: _Kind.of(groups[k]) for k in known}

    @uncompiled
    def changed_momenta(self, groups: Sequence[Group]) -> list[Group]:
        """Groups whose momenta have lost their meaning; raises for options that cannot be.

        Anything may be written into a group between steps, by schedules for one.
        """
        now = {k: {x: group[x] for x in self._options} for k, group in enumerate(groups)}
        changed = [k for k, told in now.items() if told != self._seen.get(k)]
        for group in (groups[k] for k in changed):
            option_checks.check_choices(group)
            for name, grid in zip(group["grid_names"], group["grids"], strict=True):
                option_checks.check_retraction(name, grid, group)
        kinds = {k: _Kind.of(groups[k]) for k in changed}
        before = {k: self._kinds.get(k, kind) for k, kind in kinds.items()}
        self._seen = now
        self._kinds.update(kinds)
        if before != kinds:
            self._looked_at.clear()
        return [groups[k] for k in changed if before[k].momentum != kinds[k].momentum]

    @uncompiled
    def look(self, groups: Sequence[Group], group: Group, joint: JointPlan) -> None:
        """All looks at values, before anything is changed: one on the first step of each member."""
        for owner in joint.owners:
            option_checks.check_rate(groups[owner.group], owner)
        plan = joint.plan
        if group["on_nonfinite"] == "raise":
            for mover in movers(plan, {"grad": grad_of}):
                for stack, at in chunks(mover):
                    checks.require_finite(stack.members[at], mover.read("grad", stack, at))
        fresh = [s for s in plan.stacks if not self._looked_at.issuperset(s.members)]
        if not fresh:
            return
        isometry = is_isometry(group["geometry"])
        if isometry:
            checks.require_orthonormal(plan, group["scale_lr"] is not None)
        for mover in movers(plan, {"weight": itself, "grad": grad_of}, fresh):
            for stack, at in chunks(mover):
                names, point = stack.members[at], mover.read("weight", stack, at)
                if not (isometry or group["damping"]):
                    checks.check_full_rank(names, point)
                grad = mover.read("grad", stack, at)
                checks.warn_if_inconsistent(names, point, grad, isometry)
        for stack in fresh:
            self._looked_at.update(stack.members)
