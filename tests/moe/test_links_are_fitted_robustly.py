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


def test_a_burst_that_passes_at_once_makes_a_line_that_starts_below_zero() -> None:
    """A shaped link that rested carries 128 KiB at its own speed, and the rest at its rate."""
    burst, rate, floor = 2**17, 25e6, 4e-4
    sizes = [2**18, 2**19, 2**20]
    line, residual = fit_line(sizes, [(size - burst) / rate for size in sizes], floor=floor)
    assert line.beta_seconds == pytest.approx(1 / rate)
    assert line.alpha_seconds == pytest.approx(-burst / rate)
    assert residual < 1e-9
    assert line.seconds(0) == line.seconds(burst) == line.start_seconds == floor
    assert line.seconds(2 * burst) == pytest.approx(burst / rate)
    without, residual = fit_line(sizes, [(size - burst) / rate for size in sizes])
    assert without.alpha_seconds == 0.0
    assert residual > 0.1
