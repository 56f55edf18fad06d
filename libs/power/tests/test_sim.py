import pytest

from diptych_contracts.ids import Incarnation
from diptych_contracts.power import PowerSetPoint
from diptych_costs.gpus import H100_SXM
from diptych_costs.power import Work
from diptych_power.port import CapControl, Meter
from diptych_power.sim import SimulatedDevice
from diptych_power.window import PowerWindow

IDLE_W = H100_SXM.idle_w


def set_point(cap_w: float, lease_ms: int = 10_000) -> PowerSetPoint:
    return PowerSetPoint(
        governor=Incarnation("g1"),
        worker=Incarnation("w1"),
        sequence=1,
        cap_w=cap_w,
        lease_ms=lease_ms,
    )


@pytest.fixture
def device() -> SimulatedDevice:
    device = SimulatedDevice()
    device.read(0.0)
    return device


def test_it_says_that_it_is_simulated(device: SimulatedDevice) -> None:
    meter: Meter = device
    control: CapControl = device

    assert meter.energy_source == "sim"
    assert device.name == "sim:h100-sxm"
    assert (control.cap_min_w, control.cap_default_w) == (200.0, 700.0)


def test_an_idle_device_draws_its_idle_power(device: SimulatedDevice) -> None:
    reading = device.read(10.0)

    assert reading.power_w == IDLE_W
    assert reading.energy_j == pytest.approx(10 * IDLE_W)
    assert reading.cap_w == 700.0


def test_energy_is_idle_time_plus_what_the_steps_drew_above(device: SimulatedDevice) -> None:
    step_j = device.busy(0.5, Work.PREFILL)
    step_j += device.busy(0.25, Work.DECODE, batch=8)

    assert step_j == pytest.approx(0.5 * 690 + 0.25 * 486)
    assert device.read(2.0).energy_j == pytest.approx(step_j + 1.25 * IDLE_W)


def test_power_is_the_mean_of_the_last_second(device: SimulatedDevice) -> None:
    device.busy(0.5, Work.PREFILL)

    assert device.read(1.0).power_w == pytest.approx((690 + IDLE_W) / 2)
    assert device.read(1.75).power_w == pytest.approx(IDLE_W + 0.25 * (690 - IDLE_W))
    assert device.read(3.0).power_w == pytest.approx(IDLE_W)


def test_a_step_longer_than_the_window_does_not_look_like_more_power(
    device: SimulatedDevice,
) -> None:
    device.busy(4.0, Work.PREFILL)

    assert device.read(4.0).power_w == pytest.approx(690.0)


def test_a_cap_bounds_the_power_of_the_steps_under_it(device: SimulatedDevice) -> None:
    assert device.apply(set_point(350.0), 0.0)

    assert device.busy(1.0, Work.PREFILL) == pytest.approx(350.0)
    assert device.busy(1.0, Work.DECODE, batch=1) == pytest.approx(300.0)
    assert device.slowdown(Work.PREFILL) > 1.2
    assert device.slowdown(Work.DECODE) == 1.0


def test_without_a_governor_the_default_is_back(device: SimulatedDevice) -> None:
    device.apply(set_point(350.0, lease_ms=2000), 0.0)
    assert device.read(1.9).cap_w == 350.0

    assert device.read(2.0).cap_w == 700.0

    assert device.busy(1.0, Work.PREFILL) == pytest.approx(690.0)


def test_a_mixed_step_counts_as_prefill(device: SimulatedDevice) -> None:
    assert device.step_energy_j(1.0, prefill_tokens=1, decode_tokens=8) == pytest.approx(690.0)
    assert device.step_energy_j(1.0, prefill_tokens=0, decode_tokens=8) == pytest.approx(486.0)


def test_a_smaller_board_draws_less() -> None:
    device = SimulatedDevice(350.0)

    assert (device.cap_min_w, device.cap_default_w) == (100.0, 350.0)
    assert device.busy(1.0, Work.PREFILL) == pytest.approx(345.0)


def test_energy_never_falls(device: SimulatedDevice) -> None:
    device.read(5.0)

    energies_j = [device.read(now_s).energy_j for now_s in (4.0, 5.0, 6.0)]

    assert energies_j == pytest.approx([5 * IDLE_W, 5 * IDLE_W, 6 * IDLE_W])


def test_the_window_forgets() -> None:
    window = PowerWindow(span_s=2.0)
    for _ in range(3):
        window.add(0.5, 100.0)

    assert window.mean_above_idle_w(10.0) == pytest.approx(75.0)
    assert window.mean_above_idle_w(11.0) == pytest.approx(50.0)
    assert window.mean_above_idle_w(12.0) == 0.0
