"""The accelerators that programs can be compiled for without having one."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

# The data sheet of an H100 SXM, as XLA's GpuTargetConfigProto: what its compiler asks a device for.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 8 patch: 0 }
"""
# Autotuning and Triton's products try kernels out on the device, and there is none.
_GPU_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


class MissingCompilerError(ModuleNotFoundError):
    """A target whose compiler is not installed; the message says what to install."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """An accelerator, and how many chips of it.

    Attributes:
      name: As typed, for example ``v5e-8``.
      platform: ``tpu`` or ``cuda``.
      topology: How the chips lie, in the platform's own words.
      chips: How many there are.
      memory_bytes: Of one chip.
      clock_hz: Of one chip, where it is known and the compiler estimates cycles.
      packages: The modules that hold the compiler.
      install: What to type where they are missing.
    """

    name: str
    platform: str
    topology: str
    chips: int
    memory_bytes: int
    clock_hz: float | None = None
    packages: tuple[str, ...]
    install: str

    def check(self) -> None:
        """Raise ``MissingCompilerError`` unless the target's compiler is installed."""
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            raise MissingCompilerError(f"compiling for {self.name} needs {missing[0]}: {self.install}")

    def devices(self) -> Sequence[Any]:
        """Return the chips to put shardings on; call it before JAX has looked for devices of its own.

        Raises:
          MissingCompilerError: If the compiler is not installed.
        """
        self.check()
        # The compiler must take no accelerator that this machine may have, and ask no cloud for one.
        jax.config.update("jax_platforms", "cpu")
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
        # Its lock guards the chips; compilers may run side by side.
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
        if self.platform == "tpu":
            found = topologies.get_topology_desc(platform="tpu", topology_name=self.topology)
        else:
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_GPU_FLAGS}".strip()
            found = topologies.get_topology_desc(platform="cuda", topology=self.topology, target_config=_H100)
        return found.devices[: self.chips]


def _tpu(name: str, topology: str, memory: int) -> Target:
    chips = int(name.rpartition("-")[2])
    return Target(
        name=name,
        platform="tpu",
        topology=topology,
        chips=chips,
        memory_bytes=memory << 30,
        clock_hz=1.5e9 if name.startswith("v5e") else None,
        packages=("libtpu",),
        install="pip install libtpu",
    )


def _h100(chips: int) -> Target:
    return Target(
        name=f"h100-{chips}",
        platform="cuda",
        topology=f"1x{chips}x1",
        chips=chips,
        memory_bytes=84942979072,
        packages=("jax_cuda12_plugin", "nvidia"),
        install=f"pip install jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__} "
        "nvidia-cuda-nvcc-cu12",
    )


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        _tpu("v5e-1", "v5e:1x1", 16),
        _tpu("v5e-8", "v5e:2x4", 16),
        _tpu("v5e-16", "v5e:4x4", 16),
        _tpu("v6e-1", "v6e:1x1", 32),
        _tpu("v6e-8", "v6e:2x4", 32),
        _tpu("v6e-16", "v6e:4x4", 32),
        _h100(1),
        _h100(8),
    )
}


def find_target(name: str) -> Target:
    """Return a target by its name, or raise ``ValueError`` with the names there are.

    Example:
      >>> find_target("v5e-8").chips
      8
    """
    if name not in TARGETS:
        raise ValueError(f"svb_jax.ahead_of_time needs a target out of {', '.join(TARGETS)}; got {name!r}.")
    return TARGETS[name]
