"""SM clock and energy of an NVIDIA GPU while a program runs, read from NVML, the driver's library."""

import ctypes
import functools
import statistics
import threading
import time
from typing import NamedTuple

import jax

NVML, CUDA = "libnvidia-ml.so.1", "libcuda.so.1"  # both belong to the driver: nothing is to be installed
CLOCK_SM = 1  # NVML_CLOCK_SM
EVERY = 0.005  # seconds between readings


class Reading(NamedTuple):
    """One reading of a GPU.

    at: seconds of `time.perf_counter`.
    mhz: SM clock.
    joules: energy since the driver was loaded."""

    at: float
    mhz: float
    joules: float


class Gauge:
    """Reads the clock and the energy counter of one GPU.

    bus_id: its PCI bus id, as CUDA writes it.

    Raises: OSError where the library is missing or refuses."""

    def __init__(self, bus_id: bytes):
        self._nvml = ctypes.CDLL(NVML)
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByPciBusId_v2", bus_id, ctypes.byref(self._handle))
        self.read()  # a part of a GPU (MIG) has no counter of its own

    def _call(self, name: str, *args) -> None:
        status = getattr(self._nvml, name)(*args)
        if status != 0:
            raise OSError(f"{name} of {NVML} returned error {status}")

    def read(self) -> Reading:
        mhz, millijoules = ctypes.c_uint(), ctypes.c_ulonglong()
        self._call("nvmlDeviceGetClockInfo", self._handle, CLOCK_SM, ctypes.byref(mhz))
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(millijoules))
        return Reading(time.perf_counter(), float(mhz.value), millijoules.value / 1e3)


def bus_id(ordinal: int) -> bytes:
    """PCI bus id of a CUDA device of this process.

    NVML numbers all GPUs of the host, and CUDA only the visible ones, perhaps in another order; the bus id is
    the name that both know.

    ordinal: CUDA's number of the device."""
    cuda, device, text = ctypes.CDLL(CUDA), ctypes.c_int(), ctypes.create_string_buffer(32)
    for name, *args in (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(device), ordinal),
        ("cuDeviceGetPCIBusId", text, len(text), device),
    ):
        status = getattr(cuda, name)(*args)
        if status != 0:
            raise OSError(f"{name} of {CUDA} returned error {status}")
    return text.value


@functools.cache
def gauge() -> tuple[Gauge | None, str]:
    """The gauge of power and clocks of JAX's default device.

    Returns: the gauge and "", or None and the reason why there is none."""
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return None, f"the default device is a {device.platform}"
    try:
        return Gauge(bus_id(device.local_hardware_id)), ""
    except (OSError, AttributeError) as error:
        return None, str(error)


class Watch:
    """Takes readings of a gauge in a thread while its `with` block runs.

    The energy counter stands still for 20 to 100 ms and then jumps, so power is the energy added between the
    first and the last jump, over the time between them. Each jump is seen at most `EVERY` seconds late. That
    is an error of 5 % of the power where the counter jumps every 100 ms and the block takes 250 ms, and of 2
    % where it jumps every 20 ms."""

    def __init__(self, gauge: Gauge | None):
        self._gauge, self._done = gauge, threading.Event()
        self.readings: list[Reading] = []

    def __enter__(self) -> "Watch":
        if self._gauge is not None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        if self._gauge is not None:
            self._done.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(EVERY):
            try:
                self.readings.append(self._gauge.read())
            except OSError:  # a gauge that fails now and then has fewer readings
                continue

    @property
    def mhz(self) -> float | None:
        """Median of the SM clock in the second half of the readings, when it has settled."""
        late = [reading.mhz for reading in self.readings[len(self.readings) // 2 :]]
        return statistics.median(late) if late else None

    @property
    def watts(self) -> float | None:
        """Mean power in watts; None if the counter jumped less than twice."""
        pairs = zip(self.readings, self.readings[1:], strict=False)
        jumps = [after for before, after in pairs if after.joules != before.joules]
        if len(jumps) < 2:
            return None
        return (jumps[-1].joules - jumps[0].joules) / (jumps[-1].at - jumps[0].at)
