"""Installing: kernels are built, programs bound to a device, and compared once more before they serve."""
