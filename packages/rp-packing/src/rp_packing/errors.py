"""What packing warns of."""


class KernelWarning(RuntimeWarning):
    """A kernel does not run on a device, where torch's operations do the same, slower. The message says why."""
