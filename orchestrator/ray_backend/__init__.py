"""The only folder that imports Ray."""
