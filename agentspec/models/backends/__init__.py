"""Ways to compute a pass beside torch's own kernels: ``native`` (C++ for CPUs)."""
