// The whole runtime as one translation unit: one compiler run per build mode.
#include "fibers.cpp"
#include "collectives.cpp"
#include "tensor_cores.cpp"
#include "async_copies.cpp"
#include "clusters.cpp"
#include "memory_checks.cpp"
#include "access_hooks.cpp"
#include "scheduler.cpp"
