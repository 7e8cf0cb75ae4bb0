"""The tables that `--edit-auto` chooses by: measured losses and outer settings."""

from __future__ import annotations

from megatron_edit.comm.wire import Wire
from megatron_edit.method import auto
from megatron_edit.method.auto import INTERVALS
from megatron_edit.method.strategy import outer_preset


def test_measured_losses_increase_with_interval_and_delay() -> None:
    """Catches a wrong entry: a longer interval or delay would be chosen without a reason."""
    for wire in auto.WIRE_LOSS:
        by_interval = [auto.expected_loss(tau, wire, 0) for tau in INTERVALS]
        assert by_interval == sorted(set(by_interval)), wire
        by_delay = [auto.expected_loss(64, wire, delay) for delay in range(64)]
        assert by_delay == sorted(set(by_delay)), wire
        assert Wire.of(wire).payload_bytes(1000, 2) > 0


def test_outer_presets_are_valid_at_every_interval() -> None:
    """Below and beyond the measured intervals those of the nearest one."""
    for wire in auto.WIRE_LOSS:
        for tau in range(1, 600):
            lr, momentum = outer_preset(tau, wire).values()
            assert lr > 0 and 0 <= momentum < 1
        assert outer_preset(1, wire) == outer_preset(INTERVALS[0], wire)
        assert outer_preset(10**6, wire) == outer_preset(INTERVALS[-1], wire)
    assert outer_preset(None, "fp32") == outer_preset(128, "fp32")  # A-EDiT
