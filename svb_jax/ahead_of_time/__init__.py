"""Compiling for an accelerator that this machine does not have, and reading what its compiler planned.

The TPU's and the GPU's own compilers run on any CPU host. What they return is not a time on a device, but
it is the real program: its memory, its size, its collectives and, for TPUs, an estimate of its cycles.
"""

from svb_jax.ahead_of_time.hlo import Program
from svb_jax.ahead_of_time.plan import Plan, compile_plan
from svb_jax.ahead_of_time.targets import TARGETS, MissingCompilerError, Target, find_target
from svb_jax.ahead_of_time.work import well_conditioned

__all__ = [
    "TARGETS",
    "MissingCompilerError",
    "Plan",
    "Program",
    "Target",
    "compile_plan",
    "find_target",
    "well_conditioned",
]
