"""Matrices of rank r with the geometry they inherit from all matrices.

Point           W = A Bᵀ; a grid is the one stacked pair. Frames A = U R_A, B = V R_B, and the
                core S = R_A R_Bᵀ, so W = U S Vᵀ.
Tangent         Ξ = U K Vᵀ + X Vᵀ + U Yᵀ with UᵀX = VᵀY = 0.
Retractions     svd: best rank-r approximation of W + Ξ; orthographic: the point whose difference
                to W + Ξ is normal at W.
Metric, gradient, transport and Schatten norms: `embedded`; p = 1 and whitened in closed form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels, linalg, polar, rank_core, scalars, schatten, tall
from ..linalg import Frame
from ..tall import TurnedGrams
from ..together import as_one, both, halves
from ..whitening import whiten_both
from . import decay
from .base import Landing, Pair, StepOptions, flatten_blocks
from .embedded import EmbeddedGeometry, NewCoefficients, Side, TangentXKY, squared_length

# Vectors below this share of the square norms they are told from are known to few digits.
_LITTLE = 2.0**-8


class PairFrame(NamedTuple):
    """The point and the orthonormal frames of its stacked factors, with their ``damping``."""

    point: Pair
    left: Frame
    right: Frame
    damping: float


class FixedEmbedded(EmbeddedGeometry):
    """See the header of this file."""

    name = "fixed-embedded"
    isometry = False
    retractions = ("svd", "orthographic")

    def frame(self, point: Pair, damping: float = 0.0) -> PairFrame:
        return PairFrame(point, *linalg.orthonormal_frames(*_flat(point), damping), damping)

    def lifted(self, frame: PairFrame) -> Tensor:
        return as_one(frame.left.lifted, frame.right.lifted)

    def core(self, frame: PairFrame) -> Tensor:
        """S (batch, r, r) of W = U S Vᵀ."""
        return frame.left.triangle @ frame.right.triangle.mT

    def product_square(self, frame: PairFrame) -> Tensor:
        return linalg.squared_norm(self.core(frame), 2)

    def gradient(self, frame: PairFrame, grad: Pair, repair: str = "average") -> Pair:
        if repair != "exact":
            return grad
        # Least squares of ‖ΞB − G_A‖² + ‖ΞᵀA − G_B‖² over tangent Ξ: only K is in dispute.
        left, right = frame.left, frame.right
        (a, b), (g_a, g_b) = _flat(frame.point), _flat(grad)
        k_c = left.inverse.mT @ tall.overlap(a, g_a) @ right.inverse
        k_d = (right.inverse.mT @ tall.overlap(b, g_b) @ left.inverse).mT
        s_a, s_b = left.triangle @ left.triangle.mT, right.triangle @ right.triangle.mT
        k = linalg.sylvester(s_a, s_b, s_a @ k_d + k_c @ s_b)
        over_a, over_b = (k_c - k) @ right.triangle, (k_d - k).mT @ left.triangle
        return Pair(
            tall.subtract(g_a, a, left.inverse @ over_a).view_as(grad.left),
            tall.subtract(g_b, b, right.inverse @ over_b).view_as(grad.right),
        )

    def coordinates(self, frame: PairFrame, tangent: Pair) -> TangentXKY:
        (a, b), (t_a, t_b) = _flat(frame.point), _flat(tangent)
        one, other = frame.left, frame.right
        # C = M V and its mirror image Mᵀ U hold both parts of the vector.
        c = both(tall.turned_grams, (a, b), (t_a, t_b), (other.inverse, one.inverse))
        if kernels.serve_small(a, b):
            inner_a, inner_b, k, xx, yy, square = kernels.frames.coordinates(
                (c[0].cross, c[1].cross),
                (c[0].square, c[1].square),
                (one.inverse, other.inverse),
                (one.gram, other.gram),
                (one.lifted, other.lifted),
                _LITTLE,
                _rounding(a.dtype),
                damped=frame.damping != 0,
            )
        else:
            split = _split(c, frame)
            (inner_a, inner_b), (k_left, k_right), (xx, yy) = map(halves, split)
            k = (k_left + k_right.mT) / 2
            square = squared_length(k, xx, yy)
            hidden = _hidden(square, c)
            for x in (xx, yy):
                x.diagonal(dim1=-2, dim2=-1).add_(hidden[:, None])
            square = square + 2 * k.shape[-1] * hidden
        left = Side(a, t_a, one.inverse, other.inverse, inner_a, one.gram)
        right = Side(b, t_b, other.inverse, one.inverse, inner_b, other.gram)
        return TangentXKY(left, right, k, xx, yy, square)

    def triangles(self, frame: PairFrame) -> tuple[Tensor, Tensor]:
        return frame.left.triangle, frame.right.triangle

    def steepest(self, frame: PairFrame, coords: TangentXKY, p: float, floor: float) -> TangentXKY:
        if p != 1:
            return super().steepest(frame, coords, p, floor)
        # No normal vector brings the largest singular value of the core below that of its first
        # block column, or its first block row, and one brings it there (Parrott's theorem). What
        # lies along the largest one of the two is tangent, so that it is the steepest: that for
        # (U K + X) Vᵀ and U (V Kᵀ + Y)ᵀ as if they were two vectors.
        k = coords.k
        grams = [k.mT @ k + coords.xx, k @ k.mT + coords.yy]
        left, right = schatten.directions(grams, p, floor)
        return self.tangent(frame, coords, k @ left + right @ k, left, right)

    def whitened(self, frame: PairFrame, coords: TangentXKY, options: StepOptions) -> TangentXKY:
        # C Vᵀ + U Dᵀ, whitened block by block, of C = U K + X and D = V Kᵀ + Y.
        left, right = frame.point
        eye = linalg.identity_like(coords.k).expand_as(coords.k)
        c, d = coords.combine((coords.k, coords.k.mT), (eye, eye))
        c, d = c.view_as(left), d.view_as(right)
        found = whiten_both((c, d), None, options.manner, options.sides)
        rows, turns, _ = zip(*found, strict=True)

        def against(point: Tensor, rows: Tensor, turn: Tensor, inverse: Tensor) -> Tensor:
            return inverse.mT @ (tall.overlap(point, rows) @ turn).sum(1)

        inverses, (r_a, r_b) = (frame.left.inverse, frame.right.inverse), self.triangles(frame)
        along_u, along_v = both(against, frame.point, rows, turns, inverses)
        to_a, to_b = inverses[0] @ along_v.mT @ r_b, inverses[1] @ along_u.mT @ r_a
        own = to_a[:, None], to_b[:, None]
        moved = turns[0] @ r_b[:, None], turns[1] @ r_a[:, None]
        made = Pair(*both(tall.combine, frame.point, own, rows, moved))
        return self.coordinates(frame, made)

    def step_limit(self, frame: PairFrame, coords: TangentXKY) -> Tensor:
        # ‖Ξ‖₂ < sS/(s + S), with s the smallest σ_r of a block and S that of the stacked matrix.
        left, right = (linalg.cholesky(tall.gram(x), frame.damping).inverse for x in frame.point)
        blocks = linalg.norm_bound(right[:, None] @ left[:, :, None].mT)
        whole = linalg.norm_bound(frame.right.inverse.mT @ frame.left.inverse)
        return 1 / (blocks.amax((1, 2)) + whole) / self.spectral_norm(frame, coords)

    def retract(
        self, frame: PairFrame, coords: TangentXKY, scale: Tensor, options: StepOptions
    ) -> Landing:
        svd = options.retraction == "svd" and not (options.rank_floor or options.decay_to)
        if svd and kernels.serve_small(coords.k):
            return self._retract_in_one(frame, coords, scale, options)
        g = tall.per_member(scale, coords.k)
        r_a, r_b = self.triangles(frame)
        old, moved = self.core(frame), g * coords.k
        core = old + moved
        decayed = decay.core_change(old, options) if options.weight_decay else None
        if decayed is not None:
            core = core + decayed
        before = frame.right.inverse.mT @ frame.left.inverse  # of the core, without the step
        unconverged = None
        if options.retraction == "svd":
            xx, yy = g * g * coords.xx, g * g * coords.yy
            p, f, q, unconverged = rank_core.best_rank_core(core, xx, yy, before)
        else:
            p, q = core, linalg.inverse(core, before)
            f = q.mT
        # The new column spaces are those of U + γX Q and V + γY F, orthonormal after Z_A and Z_B.
        # Between them stands the new core: P Z_B for the best approximation, P Z_B⁻ᵀ for the
        # orthographic one, each with Z_A⁻¹ in front. Its change is built from small terms: as a
        # difference, rounding would swallow a small step. From here on both sides go as one.
        squares, onto = as_one(coords.xx, coords.yy), torch.cat((g, g)) * as_one(q, f)
        weighed = squares @ onto
        turn, grow = _orthonormalizer(onto, weighed)
        (_, turn_b), (grow_a, grow_b) = halves(turn), halves(grow)
        grown, inner = grow_a @ p, grow_b.mT
        if options.retraction == "svd":
            moved, inner = moved + g * halves(weighed)[1], turn_b
        change = tall.add_product(moved + grown, p + grown, inner)
        if decayed is not None:
            change = change + decayed
        if options.rank_floor:
            change = change + _raise(old + change, options.rank_floor)
        delta = frame.left.inverse @ change @ frame.right.inverse.mT
        share, guess, long = linalg.half_share(delta)
        rest = _rest(delta, share, guess)
        triangles, changes = as_one(r_a, r_b), as_one(r_a @ rest, r_b @ share.mT)
        if not tall.can_ask(long) or long.any():
            changes = _balanced(triangles, changes, long)
        changes = tall.add_product(changes, turn, triangles + changes)
        u = triangles + changes
        x = onto @ u
        alive = torch.add(*halves(_norm(u, x, squares))) <= options.largest
        left, right = coords.move(halves(changes), halves(x), alive)
        point = Pair(left.view_as(frame.point.left), right.view_as(frame.point.right))
        return Landing(point, NewCoefficients(*halves(u), *halves(x)), alive, unconverged)

    def _retract_in_one(
        self, frame: PairFrame, coords: TangentXKY, scale: Tensor, options: StepOptions
    ) -> Landing:
        """The svd retraction with all of its r×r work in one kernel."""
        # From c W along Ξ is from W along Ξ / c, and the end times c, of which each factor has √c.
        if options.weight_decay:
            scale = scale / (1 - options.shrink)
        new, to, unconverged, norms = kernels.retraction.fixed_embedded(
            (frame.left.triangle, frame.right.triangle),
            (frame.left.inverse, frame.right.inverse),
            coords.k,
            (coords.xx, coords.yy),
            (coords.left.inner, coords.right.inner),
            scale,
            rank_core.rank_iterations(scale.dtype),
            rank_core.left_to_move(scale.dtype),
        )
        if options.weight_decay:
            root = (1 - options.shrink_of(coords.k)) ** 0.5
            new, to = [root * x for x in new], [root * x for x in to]
            to[:2] = [x + (root - 1) * linalg.identity_like(x) for x in to[:2]]
            # A learning rate on the device may be too large for this decay, and leaves no root.
            norms = norms * (1 - options.shrink) ** 0.5
        alive = scalars.within(norms[..., None].unbind(), options.largest)
        left, right = coords.moved((to[0], to[1]), (to[2], to[3]), alive)
        point = Pair(left.view_as(frame.point.left), right.view_as(frame.point.right))
        return Landing(point, NewCoefficients(*new), alive, unconverged)

    def depart(self, frame: PairFrame, coords: TangentXKY, tangent: Pair, landing: Landing) -> Pair:
        kept = self.carry(coords, landing.record, deskew=False)
        return Pair(kept.left.view_as(tangent.left), kept.right.view_as(tangent.right))


def _flat(pair: Pair) -> Pair:
    return Pair(flatten_blocks(pair.left), flatten_blocks(pair.right))


def _split(c: tuple[TurnedGrams, TurnedGrams], frame: PairFrame) -> tuple[Tensor, Tensor, Tensor]:
    """From AᵀC and CᵀC: what of U to take from C to leave X, UᵀC, and XᵀX.

    Each (2·batch, r, r), of both sides as one. XᵀX comes as a difference of Gram matrices, of
    which rounding leaves ε‖C‖². C is no longer than the whole vector, so that this is beyond the
    precision of any step; `_hidden` has the exception.
    """
    left, right = frame.left, frame.right
    overlap = as_one(left.inverse, right.inverse).mT @ as_one(c[0].cross, c[1].cross)
    inner = twice = overlap
    short = left.lifted | right.lifted
    if not tall.can_ask(short) or frame.damping or short.any():
        # A basis that is short in places has to be projected away from twice.
        gram = as_one(left.gram, right.gram)
        inner = tall.add_product(overlap, gram, overlap, 2.0, -1.0)
        twice = tall.add_product(overlap, gram, inner, 2.0, -1.0)
    return inner, overlap, as_one(c[0].square, c[1].square) - linalg.sym(inner.mT @ twice)


def _rounding(dtype: torch.dtype) -> float:
    """What rounding leaves in a difference of Gram matrices, as a share of their trace."""
    return 4 * torch.finfo(dtype).eps


def _hidden(square: Tensor, c: tuple[TurnedGrams, TurnedGrams]) -> Tensor:
    """What rounding may hide in XᵀX and YᵀY, to be added to their eigenvalues, (batch,).

    Gradients of a loss that sees the factors themselves disagree on K. Their mean may be nothing
    beside what both have, and then so is the vector. With this on top its length is none that
    rounding has made, and both matrices stay positive: a step is shorter, not longer without bound.
    """
    whole = linalg.trace(c[0].square) + linalg.trace(c[1].square)
    return torch.where(square < _LITTLE * whole, _rounding(whole.dtype) * whole, 0)


def _norm(u: Tensor, x: Tensor, xx: Tensor) -> Tensor:
    """‖U u + X x‖ (batch,), a bound on every entry; NaN where anything was not finite."""
    return torch.sqrt(linalg.squared_norm(u, 2) + linalg.squared_norm_weighted(x, xx))


def _raise(core: Tensor, floor: float) -> Tensor:
    """What lifts the singular values of ``core`` (batch, r, r) above a share of their RMS."""
    return core @ polar.raise_small_values(core, floor * linalg.typical_value(core))


def _orthonormalizer(onto: Tensor, weighed: Tensor) -> tuple[Tensor, Tensor]:
    """Z − I and Z⁻¹ − I for Z that makes U + X onto orthonormal, weighed = XᵀX onto, all r×r."""
    eye = linalg.identity_like(onto)
    root, inverse_root = linalg.root_near_identity(tall.add_product(eye, onto.mT, weighed))
    return inverse_root.mT - eye, root.mT - eye


def _rest(delta: Tensor, share: Tensor, guess: Tensor) -> Tensor:
    """(Δ − H)(I + H)⁻¹ (batch, r, r), of Δ, and H and a guess of the inverse by `half_share`."""
    if not tall.can_ask(delta):
        return (delta - share) @ linalg.inverse(linalg.identity_like(delta) + share, guess)
    # It is Δ − H less itself times H, and equals H up to Δ⁴, so that for small Δ this is it.
    found = tall.add_product(delta - share, share, share, alpha=-1.0)
    near = linalg.squared_norm(delta, 2).square() < 4 * torch.finfo(delta.dtype).eps
    if near.all():
        return found
    far = (delta - share) @ linalg.inverse(linalg.identity_like(delta) + share, guess)
    return torch.where(near[:, None, None], found, far)


def _balanced(triangles: Tensor, changes: Tensor, long: Tensor) -> Tensor:
    """Changes of both sides (2·batch, r, r) that leave the ratio of the factors' sizes.

    After a ``long`` step (batch,) alone; others keep theirs.
    """
    changed = triangles + changes
    left, right = halves(linalg.frobenius(changed) / linalg.frobenius(triangles))
    ratio = torch.where(long, (right / left).sqrt(), 1)
    return changes + tall.per_member(torch.cat((ratio, 1 / ratio)) - 1, changed) * changed
