"""The figures of arXiv 2408.04693 and their reproduction."""
