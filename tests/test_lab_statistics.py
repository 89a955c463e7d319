"""The numbers of a report: the t distribution, paired tests, curves."""

from __future__ import annotations

import math

import pytest

from rankfold.lab import statistics as st
from rankfold.lab.records import Curve


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (1, 12.7062),
        (2, 4.3027),
        (3, 3.1824),
        (5, 2.5706),
        (10, 2.2281),
        (30, 2.0423),
        (120, 1.9799),
    ],
)
def test_the_t_table(freedom: int, quantile: float) -> None:
    assert st.student_quantile(freedom) == pytest.approx(quantile, abs=6e-5)
    assert st.student_p(quantile, freedom) == pytest.approx(0.05, abs=1e-5)


def test_closed_forms_of_the_t_distribution() -> None:
    for t in (0.0, 1e-4, 0.3, 1.0, 4.0, 60.0, 1e4):
        assert st.student_p(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, abs=1e-12)
        assert st.student_p(-t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-12)
    assert st.student_quantile(9, 0.99) == pytest.approx(3.2498, abs=6e-5)


def test_incomplete_beta_by_hand() -> None:
    assert st.incomplete_beta(1, 1, 0.3) == pytest.approx(0.3)
    assert st.incomplete_beta(2, 3, 0.4) == pytest.approx(6 * 0.4**2 - 8 * 0.4**3 + 3 * 0.4**4)
    assert st.incomplete_beta(2, 3, 0.0) == 0
    assert st.incomplete_beta(2, 3, 1.0) == 1


def test_a_paired_test_by_hand() -> None:
    result = st.paired([1.0, 2.0, 3.0])  # mean 2, error 1/√3, t = 2√3 with two degrees of freedom
    t = 2 * math.sqrt(3)
    assert result.p == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert (result.low, result.high) == pytest.approx(
        (2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5)
    )
    assert st.deviation([1.0, 2.0, 4.0]) == pytest.approx(math.sqrt(7 / 3))


def test_paired_tests_without_enough_to_test() -> None:
    assert math.isnan(st.paired([0.5]).p)
    assert st.paired([0.5]).mean == 0.5
    assert math.isnan(st.paired([]).mean)
    assert st.paired([0.0, 0.0]).p == 1
    assert st.paired([0.25, 0.25]).p == 0


def test_curves_are_thinned_subtracted_and_averaged_where_they_meet() -> None:
    curve = Curve(list(range(1, 61)), [float(k) for k in range(1, 61)])
    assert st.thinned(curve, 20).steps == [1, 20, 40, 60]
    sparse = Curve([50, 100, 150], [1.0, 2.0, 3.0])
    assert st.thinned(sparse, 20) == sparse
    other = Curve([100, 150, 200], [4.0, 5.0, 6.0])
    assert st.difference(sparse, other) == Curve([100, 150], [-2.0, -2.0])
    assert st.band([sparse, other]).steps == [100, 150]
    assert st.band([sparse, other]).means == [3.0, 4.0]
