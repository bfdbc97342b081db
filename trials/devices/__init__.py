"""The memory, clock and limits of one device."""
