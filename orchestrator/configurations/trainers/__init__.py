"""The trainers: a table of keys each, and the options that keys set together."""
