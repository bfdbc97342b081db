"""Architectures to fine-tune, and the facts about them that need no torch."""
