"""explain: what the numbers of a recorded step say, and what to do about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

Numbers = Mapping[str, float]


class _Rule(NamedTuple):
    """How bad a member is by its numbers (flagged above 0), and the sentence for those that are.

    The sentence follows the members' names, and may show ``{worst}``.
    """

    badness: Callable[[Numbers], float]
    sentence: str


def _over(limit: float | Callable[[float], float], *names: str) -> Callable[[Numbers], float]:
    """The largest of these numbers, if it exceeds the limit; one may depend on the precision."""

    def badness(numbers: Numbers) -> float:
        bound = limit(numbers["precision"]) if callable(limit) else limit
        return max((numbers[n] for n in names if numbers.get(n, 0) > bound), default=0.0)

    return badness


def _nan(*names: str) -> Callable[[Numbers], float]:
    return lambda numbers: float(any(math.isnan(numbers.get(n, 0)) for n in names))


# The worst trouble first. A NaN passes every limit: it is told once, by the first two rules.
_RULES = (
    _Rule(
        _nan("left_smallest_singular_value", "right_smallest_singular_value"),
        "the weights hold NaN or infinities, and every step is skipped from here on; go back to "
        "a checkpoint.",
    ),
    _Rule(
        _over(0, "skipped"),
        "steps were not finite and were skipped, up to {worst:.0f} of one member. Look for NaN or "
        "infinite gradients: loss scaling that overflows, bad data, a division in the loss; "
        "on_nonfinite='raise' stops at the first.",
    ),
    _Rule(
        _over(lambda eps: 1e3 * eps, "left_orthogonality_defect", "right_orthogonality_defect"),
        "the factors are not orthonormal, ‖UᵀU − I‖₂ up to {worst:.2g}, and isometry geometries "
        "rely on that. Each step repairs small defects, so the steps are too long or the gradients "
        "wild: lower lr, and restore the factors with rankfold.orthonormalize_.",
    ),
    _Rule(
        # Gram matrices have the square of this condition, and must still factor.
        _over(lambda eps: 0.3 * eps**-0.5, "left_condition", "right_condition"),
        "factors are close to losing rank, condition up to {worst:.2g}, about as much as the "
        "working precision can take. Lower lr, set damping, keep the weights in float64, or use a "
        "smaller rank.",
    ),
    _Rule(
        _over(1, "step_share"),
        "the last step was {worst:.2g} times as long as its retraction is certain to be well "
        "defined for. Lower lr, or cut such steps with trust_region=0.5.",
    ),
    _Rule(
        _over(0.1, "gradient_inconsistency"),
        "the factor gradients disagree by up to {worst:.0%} of their size, so the loss does not "
        "depend on the product alone. Check axis=, start= and blocks=; rotary embeddings or "
        "normalization between the factors (QK-norm) do this too: leave such pairs out, or use "
        "gradient_repair='exact' and read the step as a heuristic.",
    ),
    _Rule(
        _over(0, "lifted"),
        "Gram matrices were singular to working precision and had to be lifted, up to {worst:.0f} "
        "times for one member. Lower lr, set damping, or use a smaller rank.",
    ),
    _Rule(
        _over(0.1, "momentum_decoherence"),
        "the momentum is no tangent vector where it is used, its two halves disagree by up to "
        "{worst:.0%}. Weights written between steps (a reload, an EMA swap) do this: call "
        "optimizer.reset_momentum() after writing them.",
    ),
    _Rule(
        _over(0.5, "momentum_deskewing", "momentum_horizontality"),
        "up to {worst:.0%} of the momentum is projected away on arrival. Steps are long beside "
        "the factors, or weights were written between steps: lower lr, or call "
        "optimizer.reset_momentum() after writing them.",
    ),
    _Rule(
        _over(0, "unconverged"),
        "the truncated-SVD retraction stopped early, up to {worst:.0f} times for one member. Many "
        "of these mean steps that are long beside the smallest singular value: lower lr, set "
        "trust_region, or take retraction='orthographic' in fixed-embedded.",
    ),
    _Rule(
        _over(0, "clipped"),
        "steps were cut to the trust region, up to {worst:.0f} times for one member. If that is "
        "most of the time, lr is too high.",
    ),
)
_MOST_NAMES = 4


def explain(diagnostics: Mapping[str, Numbers]) -> list[str]:
    """What is wrong, worst first, and what to do about it: one sentence or two a trouble.

    ``diagnostics`` is what `RiemannianSGD.diagnostics` returned. Members with the same trouble
    share an entry, the worst of them named first. Where nothing is wrong, one entry says so.
    """
    found = list(_troubles(diagnostics))
    if found:
        return found
    return [f"Nothing is wrong with the {len(diagnostics)} members measured."]


def _troubles(diagnostics: Mapping[str, Numbers]) -> Iterator[str]:
    for rule in _RULES:
        badness = {member: rule.badness(numbers) for member, numbers in diagnostics.items()}
        flagged = sorted((m for m in badness if badness[m] > 0), key=lambda m: -badness[m])
        if flagged:
            named = ", ".join(flagged[:_MOST_NAMES])
            if len(flagged) > _MOST_NAMES:
                named += f" and {len(flagged) - _MOST_NAMES} more"
            yield f"{named}: {rule.sentence.format(worst=badness[flagged[0]])}"
