"""What tests and benchmarks share: small models, parity runs, and the pytest plugin for tests under MPI."""
