"""Rates of hardware by its name, and of this machine."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.errors import ConfigError
from baton.planning.device_profile import DeviceProfile, nominal_gpu, save
from baton.planning.hardware import CPU_CORE, Hardware
from baton_lab.study.known_hardware import CHIPS, HARDWARE, chip_of, hardware_of
from deploy.machine import this_machine
from deploy.machine.device_profile import kept_path


def test_hardware_is_found_by_its_name() -> None:
    assert all(hardware_of(name) is rates for name, rates in HARDWARE.items())
    assert all(chip_of(name.upper()) is chip for name, chip in CHIPS.items())


@pytest.mark.parametrize(("find", "names"), [(hardware_of, HARDWARE), (chip_of, CHIPS)])
def test_an_unknown_name_lists_the_known_and_this_machine(find: Callable[[str], object], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find("abacus")
    assert str(caught.value) == (
        f"hardware = 'abacus' is unknown: use one of {', '.join(names)}, or here for this machine"
    )


def test_this_machine_is_one_core_with_the_rates_that_were_measured(keep_core: Callable[[Hardware], None]) -> None:
    assert hardware_of("here") == CPU_CORE  # nothing was measured yet
    measured = replace(CPU_CORE, linear_flops=3e11, pair_flops=5e10, memory_bandwidth=7e9)
    keep_core(measured)
    assert hardware_of("here") == measured


@pytest.mark.usefixtures("keep_core")
def test_this_machine_is_its_gpu_if_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "gpu_name", lambda: "NVIDIA H200")
    nominal = nominal_gpu("NVIDIA H200", 2).hardware
    assert hardware_of("here") == nominal
    measured = replace(nominal, linear_flops=5e14)
    path = kept_path("cuda", 2, "NVIDIA H200")
    path.parent.mkdir(parents=True, exist_ok=True)
    save(DeviceProfile("NVIDIA H200", "cuda", measured, measured.memory_bandwidth, is_measured=True), path)
    assert hardware_of("here") == measured
