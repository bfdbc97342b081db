"""Laws of memory and time, fitted to observations."""
