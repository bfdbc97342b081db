"""The side of a fork server and its children, whatever they build. No torch."""
