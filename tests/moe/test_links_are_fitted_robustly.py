"""Lines through measured times: exact where times are, and not bent by one bad measurement."""

import pytest

from lightning_parm.moe.links import Line, fit_line

TRUE = Line(alpha_seconds=2e-4, beta_seconds=3e-10)


def test_exact_times_give_the_line_back() -> None:
    sizes = [1e3, 1e5, 1e6, 1e7]
    line, residual = fit_line(sizes, [TRUE.seconds(size) for size in sizes])
    assert line.alpha_seconds == pytest.approx(TRUE.alpha_seconds)
    assert line.beta_seconds == pytest.approx(TRUE.beta_seconds)
    assert residual < 1e-9


def test_one_disturbed_measurement_is_told_and_bends_the_line_little() -> None:
    sizes = [1e4, 1e5, 1e6, 3e6, 1e7, 3e7]
    times = [TRUE.seconds(size) for size in sizes]
    times[2] *= 5
    line, residual = fit_line(sizes, times)
    assert residual > 0.5
    assert line.beta_seconds == pytest.approx(TRUE.beta_seconds, rel=0.15)


def test_no_constant_is_negative() -> None:
    falling, _ = fit_line([1e3, 1e6], [2e-3, 1e-3])
    through_the_floor, _ = fit_line([1e6, 2e6], [1e-4, 3e-4])
    assert falling.beta_seconds == 0.0
    assert through_the_floor.alpha_seconds == 0.0


def test_what_counts_more_is_met_more_closely() -> None:
    """Messages near a layer's own size decide, and a burst that swallows a smaller one must not outvote them."""
    sizes, times = [2**14, 2**17, 2**19], [2.4e-3, 4.3e-3, 33.2e-3]
    equal, _ = fit_line(sizes, times)
    line, _ = fit_line(sizes, times, counts=[size**0.5 for size in sizes])
    assert equal.seconds(sizes[-1]) < 0.5 * times[-1]
    assert line.seconds(sizes[-1]) > 0.6 * times[-1]
