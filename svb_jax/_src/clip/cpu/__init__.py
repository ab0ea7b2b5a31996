"""The projection on CPU.

Accelerators take equal matrices as one batch. On CPU that is wrong for three reasons. The figures are from
two cores with jaxlib 0.10; ``benchmarks projection`` has rows without each of these measures.

- LAPACK's threads. Decompositions that XLA runs at the same time on an OpenBLAS with its own threads
  collapse: one busy process beside a projection of WRN-28-10 turned 0.6 s into 25 s, and on a quiet machine
  it takes 1.3 times as long. So OpenBLAS gets one thread (``blas.py``).
- Batched eigendecompositions. Several in flight, next to products, have been seen to hang XLA's thread pool
  for good (jax-ml/jax#39292 is a relative). So one matrix is taken after another (``sequential.py``), which
  costs a fifth of the time on WRN-28-10.
- Compile time. XLA compiles kernels for every shape, some 10 ms each, while clipping a small matrix takes
  less than one. So small matrices are zero-padded to a few common shapes (``buckets.py``), one program for
  many shapes: ConvNet-38's projection compiles in 1.5 s instead of 4.3 s, and takes 8 ms instead of 5.
  Slices of one shape out of a bucket share a kernel (``slices.py``): ResNet-68's projection compiles in 1.9 s
  instead of 2.3 s.

Nothing outside of this folder knows of it but the dispatch in ``svb_jax/_src/clip/__init__.py``.
"""

from svb_jax._src.clip.cpu.sequential import clip_sequentially

__all__ = ["clip_sequentially"]
