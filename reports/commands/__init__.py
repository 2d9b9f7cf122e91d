"""The commands of `parity`, one function of the same name per module."""
