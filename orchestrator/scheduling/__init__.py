"""Order of the measurements, and placement of their trials on nodes."""
