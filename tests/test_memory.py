"""Freed memory stays with the process, so that a step's buffers are not mapped and cleared anew."""

import subprocess
import sys

import pytest

# 64 MiB are 16,384 pages of 4 KiB; a process of its own, because the setting is for good.
PROGRAM = """
import resource
import sys
from svb_jax.training.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * 2**26
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the setting is one of glibc")
@pytest.mark.parametrize(("keeps", "few"), [("keep", True), ("give back", False)])
def test_memory_that_is_kept_is_not_mapped_anew(keeps, few):
    command = [sys.executable, "-c", PROGRAM, keeps]
    num_faults = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (num_faults < 100) == few
