"""Clock and energy of a GPU, from libraries with the driver's names."""

import itertools
import subprocess
import time
import types

import jax
import pytest

from jax_sparse24.measure import nvml

FAKE_LIBRARIES = """
#include <string.h>
extern "C" {
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal + 40; return 0; }
int cuDeviceGetPCIBusId(char* text, int size, int device) {
  strncpy(text, device == 41 ? "0000:0F:00.0" : "?", size);
  return 0;
}
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
  *handle = (void*)0xfedcba9876543210;
  return strcmp(id, "0000:0F:00.0");
}
int nvmlDeviceGetClockInfo(void* handle, int type, unsigned* mhz) {
  *mhz = type == 1 ? 1365 : 0;
  return handle != (void*)0xfedcba9876543210;
}
int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* mj) {
  static unsigned long long calls = 0;
  *mj = 5000000000000 + calls++ / 4 * 14000;
  return 0;
}
}
"""


def test_clock_and_energy_of_the_gpu_that_jax_computes_on(tmp_path, monkeypatch):
    """Libraries with the driver's names and signatures: device 1 of CUDA by its bus id, a counter that
    stands still between jumps."""
    source, library = tmp_path / "fake.cc", tmp_path / "fake.so"
    source.write_text(FAKE_LIBRARIES)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setattr(nvml, "NVML", library)
    monkeypatch.setattr(nvml, "CUDA", library)
    assert nvml.bus_id(1) == b"0000:0F:00.0"
    gauge = nvml.Gauge(nvml.bus_id(1))
    assert gauge.read()[1:] == (1365.0, 5e9)
    with pytest.raises(OSError, match="nvmlDeviceGetHandleByPciBusId_v2"):
        nvml.Gauge(nvml.bus_id(0))
    with nvml.Watch(gauge) as watch:
        time.sleep(0.2)
    readings = watch.readings
    assert len(readings) > 12 and watch.mhz == 1365
    jumps = [b for a, b in itertools.pairwise(readings) if a.joules != b.joules]
    expected = (jumps[-1].joules - jumps[0].joules) / (jumps[-1].at - jumps[0].at)
    assert watch.watts == pytest.approx(expected) and expected > 100
    watch.readings = readings[:3]
    assert watch.watts is None, "one jump at most tells no power"


def test_there_is_no_gauge_without_an_nvidia_gpu(monkeypatch):
    nvml.gauge.cache_clear()
    found, why = nvml.gauge()
    assert found is None and "cpu" in why
    nvml.gauge.cache_clear()
    device = types.SimpleNamespace(platform="gpu", local_hardware_id=0)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(nvml, "CUDA", "no-such-library.so")
    found, why = nvml.gauge()
    assert found is None and "no-such-library.so" in why
    nvml.gauge.cache_clear()
