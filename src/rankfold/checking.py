"""When an optimizer checks what: options whenever they change, values on a member's first steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import checks, option_checks
from .eager import uncompiled
from .geometries import is_isometry
from .groups import Group, JointPlan
from .movers import chunks, movers
from .stacks import Plan, grad_of, itself

# Gradients that are zero, as behind weights that start at zero, or not finite, as of a `GradScaler`
# that has yet to find its scale, say nothing: others are waited for, but not for long.
_MOST_LOOKS = 10


class _Kind(NamedTuple):
    """What of a group's options says what its state means.

    ``momentum`` is its geometry, and what it is made of: gradients, unit ones, or steps; ``scaled``
    whether factors have a scale of their own.
    """

    momentum: tuple[str, str]
    scaled: bool

    @classmethod
    def of(cls, group: Group) -> _Kind:
        """Groups that were saved by an earlier version may lack options."""
        form = group.get("momentum_form", "smoothing")
        return cls((group["geometry"], form), group.get("scale_lr") is not None)


class Checking:
    """What has been checked so far.

    ``options`` are the names of those that groups have, but for the learning rate, which changes
    at every step.
    """

    def __init__(self, options: Sequence[str]) -> None:
        self._options = options
        self._seen: dict[int, Group] = {}
        self._kinds: dict[int, _Kind] = {}
        # How often gradients of a member have been looked at, and all looks if one was enough.
        self._looks: Counter[str] = Counter()

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
            self._looks.clear()
        return [groups[k] for k in changed if before[k].momentum != kinds[k].momentum]

    @uncompiled
    def look(self, groups: Sequence[Group], group: Group, joint: JointPlan) -> None:
        """All looks at values, before anything is changed.

        At weights on the first step of each member, at gradients until they tell something.
        """
        for owner in joint.owners:
            option_checks.check_rate(groups[owner.group], owner)
        plan = joint.plan
        if group["on_nonfinite"] == "raise":
            for mover in movers(plan, {"grad": grad_of}):
                for stack, at in chunks(mover):
                    checks.require_finite(stack.members[at], mover.read("grad", stack, at))
        isometry = is_isometry(group["geometry"])
        fresh = [s for s in plan.stacks if not self._looks.keys() >= set(s.members)]
        if fresh and isometry:
            checks.require_orthonormal(plan, group["scale_lr"] is not None)
        for mover in movers(plan, {"weight": itself}, fresh) if fresh else ():
            for stack, at in chunks(mover):
                if not (isometry or group["damping"]):
                    checks.check_full_rank(stack.members[at], mover.read("weight", stack, at))
        silent = [s for s in plan.stacks if any(self._looks[m] < _MOST_LOOKS for m in s.members)]
        # What is recorded into a graph has been looked at before, and cannot be waited for.
        if not silent or (not fresh and _is_capturing(plan)):
            return
        for mover in movers(plan, {"weight": itself, "grad": grad_of}, silent):
            for stack, at in chunks(mover):
                names, point = stack.members[at], mover.read("weight", stack, at)
                told = checks.warn_if_inconsistent(
                    names, point, mover.read("grad", stack, at), isometry
                )
                for name, tells in zip(names, told, strict=True):
                    self._looks[name] = _MOST_LOOKS if tells else self._looks[name] + 1


def _is_capturing(plan: Plan) -> bool:
    return plan.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
